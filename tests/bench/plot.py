"""
The losses of runs over their training FLOPs, in one picture: python tests/bench/plot.py out/RUN out/OTHER

Folders are searched for runs at any depth. The legend has each run's lowest validation loss. Losses are in nats per
token, or in bits per byte of text if the runs are not evaluated on the same tokens.
"""

out = "runs.png"  # output file; its suffix sets the format; without one that matplotlib knows, .png

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib import colormaps
from matplotlib.figure import Figure

from config import UserError, configure


def read_run(folder):
    """Return the hash of a run's validation tokens, its evaluations, and the operations of training until each."""
    tokens, operations, evaluations = None, [], []
    for line in map(json.loads, (folder / "log.jsonl").read_text().rpartition("\n")[0].splitlines()):
        if line["event"] in ("start", "resume"):
            sizes = [line["settings"][name] for name in ("batch_size", "gradient_accumulation_steps", "block_size")]
            per_step = (line["flops_per_token"] or math.nan) * math.prod(sizes)  # null: they could not be counted
            tokens = line["data"]["sha256"]["val"]
        elif line["event"] == "eval":
            operations.append(line["step"] * per_step)
            evaluations.append(line)
    return tokens, evaluations, operations


def draw_losses(paths):
    """Draw the validation losses of all runs below some folders."""
    runs = {}
    for path in paths:
        folders = [log.parent for log in sorted(path.rglob("log.jsonl"))]
        if not folders:
            raise UserError(f"{path} holds no run: name folders of train.py's runs, or folders above them")
        for folder in folders:
            tokens, evaluations, operations = read_run(folder)
            if evaluations and math.isfinite(operations[0]):
                runs[folder] = tokens, evaluations, operations
            else:
                why = "its operations could not be counted" if evaluations else "it has no evaluation yet"
                print(f"NOTE    {folder} is left out: {why}")
    if not runs:
        raise UserError(f"nothing to draw in: {', '.join(map(str, paths)) or 'no folder given'}")
    # a token of one tokenizer may stand for more text than one of another
    same = len({tokens for tokens, *_ in runs.values()}) == 1
    measure, unit = ("val_loss", "nats per token") if same else ("bits_per_byte", "bits per byte of text")
    figure = Figure()
    axis = figure.subplots()
    if len(runs) > 10:  # more than there are default colors
        axis.set_prop_cycle(color=colormaps["turbo"].resampled(len(runs)).colors)
    for folder, (_, evaluations, operations) in runs.items():
        losses = [evaluation[measure] for evaluation in evaluations]
        axis.plot(operations, losses, marker=".", label=f"{min(losses):.3f}  {folder}".replace("$", r"\$"))
    axis.set(xlabel="training FLOPs", ylabel=f"validation loss ({unit})")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)  # above, however many runs there are
    return figure


def draw_differences(found):
    """Draw {variant: {tokens per parameter: (difference of losses, half-width of its interval)}}, as in RESULTS.md."""
    figure = Figure((6, 3.5), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0, color="gray", linewidth=1)
    for number, (name, points) in enumerate(found.items()):
        shifted = [tokens * 1.05**number for tokens in points]  # no interval hides another
        axis.errorbar(shifted, *zip(*points.values(), strict=True), marker="o", capsize=3, label=name)
    ticks = sorted({tokens for points in found.values() for tokens in points})
    axis.set(xscale="log", xlabel="training tokens per parameter", ylabel="loss minus the standard model's (nats)")
    axis.set_xticks(ticks, map(str, ticks))
    axis.minorticks_off()
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def main(argv):
    paths = [Path(word) for word in argv if not word.startswith("-")]
    globals().update(configure(__file__, [word for word in argv if word.startswith("-")]).values)
    figure = draw_losses(paths)
    path = out if Path(out).suffix[1:] in figure.canvas.get_supported_filetypes() else f"{out}.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")  # which makes room for the legend
    print(f"figure: {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
