"""
The losses of runs over the operations of their training, in one picture: python tests/bench/plot.py out/RUN out/OTHER

Folders are searched for runs at any depth. The legend has each run's lowest validation loss.

Attention weights over a text, a row per layer and a column per head: plot.py out/RUN --maps="a text" --out=maps.png
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from matplotlib.figure import Figure

from config import read_settings
from config.runtime import checkpoints
from config.runtime.errors import UserError, file_errors
from config.runtime.models import build_model
from config.runtime.processes import install_excepthook
from data.tokenizer import tokenizer_from_state

# -----------------------------------------------------------------------------
out = "runs.png"  # output file; its suffix sets the format
maps = ""  # draw the attention weights over this text instead
# -----------------------------------------------------------------------------


def read_run(folder):
    """Return the operations of training until each evaluation of a run, and the validation losses."""
    operations, losses = [], []
    for line in map(json.loads, (folder / "log.jsonl").read_text().rpartition("\n")[0].splitlines()):
        if line["event"] in ("start", "resume"):
            sizes = [line["settings"][name] for name in ("batch_size", "grad_accum_steps", "block_size")]
            per_step = line["flops_per_token"] * math.prod(sizes)
        elif line["event"] == "eval":
            operations.append(line["step"] * per_step)
            losses.append(line["val_loss"])
    return operations, losses


def draw_losses(paths):
    """Draw the validation losses of all runs below some folders."""
    figure = Figure(layout="constrained")
    axis = figure.subplots()
    for folder in [log.parent for path in paths for log in sorted(path.rglob("log.jsonl"))]:
        operations, losses = read_run(folder)
        if losses:
            axis.plot(operations, losses, label=f"{min(losses):.3f}  {folder}".replace("$", r"\$"))
    if not axis.lines:
        raise UserError(f"no evaluated run in: {', '.join(map(str, paths)) or 'no folder given'}")
    axis.set(xlabel="training FLOPs", ylabel="validation loss")
    figure.legend(loc="outside upper center", frameon=False)
    return figure


@torch.no_grad()
def attention_weights(model, idx) -> list[torch.Tensor]:
    """Return the attention weights (B, H, T, T) of each layer for tokens idx (B, T): what it mixes of unit vectors."""
    weights = {}

    def keep(attn, inputs, output):
        *_, q_hat, k_hat, v = inputs
        unit_vectors = torch.eye(v.size(2)).to(v).expand(*v.shape[:2], -1, -1)
        weights[attn] = attn.mix_values(q_hat, k_hat, unit_vectors)

    hooks = [block.attn.register_forward_hook(keep) for block in model.blocks]
    model.features(idx)
    for hook in hooks:
        hook.remove()
    return list(weights.values())


def draw_maps(folder, text):
    """Draw the attention weights over a text: dark is large, by the square root of the weight."""
    saved = checkpoints.load(checkpoints.find(folder, prefer="best"))
    model, tokenizer = build_model(saved).eval(), tokenizer_from_state(saved["tokenizer"])
    tokens = tokenizer.encode(text)[-model.config.block_size :]
    weights = torch.cat(attention_weights(model, torch.tensor([tokens]))).sqrt()
    labels = [repr(tokenizer.decode([token]))[1:-1] for token in tokens]
    side = 1.2 + 0.1 * len(tokens)
    figure = Figure(figsize=(side * weights.size(1), side * weights.size(0)), layout="tight")
    for (layer, head), axis in np.ndenumerate(figure.subplots(*weights.shape[:2], squeeze=False)):
        axis.imshow(weights[layer, head].numpy(), cmap="Blues", vmin=0, vmax=1)
        axis.set_title(f"layer {layer}, head {head}: queries down, keys across", fontsize=6)
        axis.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=5, parse_math=False)
        axis.set_yticks(range(len(tokens)), labels, fontsize=5, parse_math=False)
    return figure


def main(argv):
    paths = [Path(word) for word in argv if not word.startswith("-")]
    options = read_settings(__file__, [word for word in argv if word.startswith("-")])
    figure = draw_maps(paths[0], options["maps"]) if options["maps"] else draw_losses(paths)
    with file_errors():
        figure.savefig(options["out"], dpi=120)
    print(f"figure: {options['out']}")


if __name__ == "__main__":
    install_excepthook()
    main(sys.argv[1:])
