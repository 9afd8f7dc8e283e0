"""
The losses of runs over their training FLOPs, in one picture: python tests/bench/plot.py out/RUN out/OTHER

Folders are searched for runs at any depth. The legend has each run's lowest validation loss.
"""

out = "runs.png"  # output file; its suffix sets the format

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.figure import Figure

from config import configure
from config.runtime.program import UserError, file_errors


def read_run(folder):
    """Return the operations of training until each evaluation of a run, and the validation losses."""
    operations, losses = [], []
    for line in map(json.loads, (folder / "log.jsonl").read_text().rpartition("\n")[0].splitlines()):
        if line["event"] in ("start", "resume"):
            sizes = [line["settings"][name] for name in ("batch_size", "grad_accum_steps", "block_size")]
            per_step = (line["flops_per_token"] or math.nan) * math.prod(sizes)  # null: they could not be counted
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
    axis.set(xlabel="training FLOPs", ylabel="validation loss (nats per token)")
    figure.legend(loc="outside upper center", frameon=False)
    return figure


def main(argv):
    paths = [Path(word) for word in argv if not word.startswith("-")]
    configure(globals(), [word for word in argv if word.startswith("-")])
    with file_errors():
        draw_losses(paths).savefig(out, dpi=120)
    print(f"figure: {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
