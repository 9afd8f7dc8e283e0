"""A picture of a model's attention weights over a text: sample.py --maps=FILE."""

from pathlib import Path

import numpy as np
import torch

from config.runtime.errors import UserError, file_errors, import_optional
from config.runtime.files import atomic_write

LABELED = 32  # tokens, at most, that have room for their text


@torch.no_grad()
def look_inside(model, idx) -> list[torch.Tensor]:
    """Return the attention weights (B, H, T, T) of each layer for the tokens idx (B, T).

    They are the layer's output when its values are the unit vectors. Layers that recompute it use the same ones.
    """
    weights = {}

    def keep(attn, inputs, output):
        _, q_hat, k_hat, *_ = inputs
        T = k_hat.size(2)
        weights[attn] = attn.mix_values(q_hat, k_hat, torch.eye(T).to(k_hat).expand(*k_hat.shape[:2], T, T))

    hooks = [block.attn.register_forward_hook(keep) for block in model.blocks]
    try:
        model.features(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return list(weights.values())


@file_errors()
def draw_maps(model, tokens, tokenizer, path):
    """Write a picture of the attention weights over `tokens`, a list: a row for each layer, a column for each head."""
    path = Path(path)
    tokens = tokens[-model.config.block_size :]
    kind = path.suffix.removeprefix(".") or "png"
    if kind not in ("png", "pdf", "svg"):  # matplotlib's other formats may need LaTeX
        raise UserError(f"{path}: must be a .png, .pdf or .svg file")
    if path.exists():
        raise UserError(f"{path} already exists: name a new file")
    import_optional("matplotlib")
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    layers = look_inside(model, torch.tensor([tokens], device=model.head.weight.device))
    texts = [repr(tokenizer.decode([token]))[1:-1].replace("$", r"\$").replace(" ", "␣") for token in tokens]
    side = 1.2 + 0.12 * min(len(tokens), LABELED)
    rows, columns = len(layers), model.config.n_head
    figure = Figure(figsize=(side * columns, side * rows), layout="tight")
    axes = figure.subplots(rows, columns, squeeze=False)
    for l, h in np.ndindex(rows, columns):
        axis = axes[l, h]
        weights = layers[l][0, h].float().cpu().numpy()
        axis.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0, 1, clip=True))  # small weights are seen too
        axis.set_title(f"layer {l}, head {h}", fontsize=6)
        axis.tick_params(labelsize=5)
        if len(tokens) <= LABELED:
            axis.set_xticks(range(len(tokens)), texts, rotation=90)
            axis.set_yticks(range(len(tokens)), texts)
    figure.supylabel("query", fontsize=8)
    figure.supxlabel("key; white: 0, darkest: 1, by the square root of the weight", fontsize=8)
    with atomic_write(path) as file:
        figure.savefig(file, dpi=200, format=kind)
