"""What a model does inside, seen by hooks while it runs: attention weights, and the terms that its layers add up."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from config.runtime.common import UserError, atomic_write, file_errors
from model import SummedQKAttention

LABELLED = 32  # tokens, at most, that have room for their text


@dataclass
class Layer:
    """What a layer l has done: h = x + Σ_i attention[i] and x' = h + Σ_i mlp[i].

    i is a layer, of those summed, and each term (B, T, C) has its weight w_i in it. Where a method has several terms,
    x, or h, is not there unless keep_input is on.
    """

    weights: torch.Tensor = None  # (B, H, T, T): of the layer's own tokens, and wherever a later layer recomputes it
    scores: torch.Tensor | None = None  # summed_qk: (B, H, m, T, T), what each of the layers so far adds to the scores
    attention: dict[int, torch.Tensor] = field(default_factory=dict)
    mlp: dict[int, torch.Tensor] = field(default_factory=dict)


@torch.no_grad()
def look_inside(model, idx) -> list[Layer]:
    """Return what each layer of `model` does with the tokens idx (B, T), as a `Layer`.

    The model is to be in eval mode, and not compiled. Raises ValueError for a T that does not fit.
    """
    layers = []  # those that have begun: the last one runs

    def begin(block, inputs):
        layers.append(Layer())

    def after_attention(source, attn, inputs, output):
        layers[-1].attention[source] = output
        if source == len(layers) - 1:  # not recomputed
            _, q_hat, k_hat, *_ = inputs
            layers[-1].weights, layers[-1].scores = attention_weights(attn, q_hat, k_hat), scores(attn, q_hat, k_hat)

    def after_mlp(source, mlp, inputs, output):
        layers[-1].mlp[source] = output

    with ExitStack() as hooks:
        for l, block in enumerate(model.blocks):
            for handle in (
                block.register_forward_pre_hook(begin),
                block.attn.register_forward_hook(partial(after_attention, l)),
                block.mlp.register_forward_hook(partial(after_mlp, l)),
            ):
                hooks.callback(handle.remove)
        model.features(idx)

    for l, (block, layer) in enumerate(zip(model.blocks, layers)):
        if block.summed:
            terms = getattr(layer, block.summed)
            weighted = {i: w * terms[i] for i, w in zip((*block.sources, l), block.weights())}
            setattr(layer, block.summed, weighted)
        if block.summed == "mlp":  # the sources' attention is in their MLPs' input, not in h
            layer.attention = {l: layer.attention[l]}
    return layers


def attention_weights(attn, q_hat, k_hat):
    """Return the weights (B, H, T, T) of any kind: what it makes of values that are the unit vectors."""
    T = k_hat.size(2)
    return attn.mix_values(q_hat, k_hat, torch.eye(T).to(k_hat).expand(*k_hat.shape[:2], T, T))


def scores(attn, q_hat, k_hat):
    """Return what each layer adds to the scores of summed_qk, (B, H, m, T, T); None for other kinds."""
    if not isinstance(attn, SummedQKAttention):
        return None
    k_hat = k_hat.repeat_interleave(attn.H // attn.G, dim=1)
    q, k = (x.unflatten(-1, (attn.m, attn.D)).transpose(2, 3) for x in (q_hat, k_hat))
    return q @ k.mT


def draw_maps(model, tokens, tokenizer, path):
    """Write a picture of the attention weights over `tokens`, a list: a row for each layer, a column for each head.

    Raises UserError for fewer than two tokens, for a file that is there, or cannot be written, or of an unknown kind,
    and where matplotlib is missing.
    """
    path, tokens = Path(path), tokens[-model.config.block_size :]
    if path.exists():
        raise UserError(f"{path} is there already: name a new file")
    if len(tokens) < 2:
        raise UserError("a map needs two tokens or more: give a text by --start")
    if not find_spec("matplotlib"):
        raise UserError("a map needs matplotlib: pip install matplotlib")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.colors import PowerNorm

    layers = look_inside(model, torch.tensor([tokens], device=model.head.weight.device))
    texts = [repr(tokenizer.decode([token]))[1:-1].replace("$", r"\$").replace(" ", "␣") for token in tokens]
    side = 1.2 + 0.12 * min(len(tokens), LABELLED)
    shape = len(layers), model.config.n_head
    figure, axes = pyplot.subplots(*shape, figsize=(side * shape[1], side * shape[0]), squeeze=False)
    for l, layer in enumerate(layers):
        for h, weights in enumerate(layer.weights[0].float().cpu().numpy()):
            axis = axes[l, h]
            axis.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0, 1, clip=True))  # small weights are seen too
            axis.set_title(f"layer {l}, head {h}", fontsize=6)
            if len(tokens) <= LABELLED:
                axis.set_xticks(range(len(tokens)), texts, fontsize=5, rotation=90)
                axis.set_yticks(range(len(tokens)), texts, fontsize=5)
            else:
                axis.tick_params(labelsize=5)
    figure.supylabel("query", fontsize=8)
    figure.supxlabel("key; white: 0, darkest: 1, by the square root of the weight", fontsize=8)
    figure.tight_layout()
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise UserError(f"{path}: matplotlib writes no .{kind}: name a .png, .pdf or .svg")
    with file_errors(), atomic_write(path) as file:
        figure.savefig(file, dpi=200, format=kind)
    pyplot.close(figure)
