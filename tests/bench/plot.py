"""
The losses of runs over their training FLOPs, in one picture: python tests/bench/plot.py out/RUN out/OTHER

Folders are searched for runs at any depth. The legend has each run's lowest validation loss. Losses are in nats per
token, or in bits per byte of text if the runs are not evaluated on the same tokens.
"""

out = "runs.png"  # output file; its suffix sets the format

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
            if evaluations:
                runs[folder] = tokens, evaluations, operations
            else:
                print(f"NOTE    {folder} is left out: it has no evaluation yet")
    if not runs:
        raise UserError(f"no evaluated run in: {', '.join(map(str, paths)) or 'no folder given'}")
    # a token of one tokenizer may stand for more text than one of another
    same = len({tokens for tokens, *_ in runs.values()}) == 1
    measure, unit = ("val_loss", "nats per token") if same else ("bits_per_byte", "bits per byte of text")
    figure = Figure(layout="constrained")
    axis = figure.subplots()
    for folder, (_, evaluations, operations) in runs.items():
        losses = [evaluation[measure] for evaluation in evaluations]
        axis.plot(operations, losses, label=f"{min(losses):.3f}  {folder}".replace("$", r"\$"))
    axis.set(xlabel="training FLOPs", ylabel=f"validation loss ({unit})")
    figure.legend(loc="outside upper center", frameon=False)
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
    if "" in argv:  # as a path, it would be the current folder
        raise UserError("'' is invalid: name folders of train.py's runs, or folders above them")
    draw_losses(paths).savefig(out, dpi=120)
    print(f"figure: {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
