"""
The losses of runs in one picture: python tests/bench/plot.py out [--x=time]

Folders are searched for runs at any depth. The legend has each run's lowest validation loss. Time is training time,
without evaluating and saving. The y axis leaves out each run's first quarter.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.figure import Figure

from config import read_settings
from config.runtime.errors import UserError, file_errors
from config.runtime.processes import install_excepthook
from runs import read_log

# -----------------------------------------------------------------------------
x = "tokens"  # x axis: tokens, flops or time
out = "runs.png"  # output file; its suffix sets the format
# -----------------------------------------------------------------------------

AXES = {"tokens": "training tokens", "flops": "training FLOPs", "time": "minutes of training"}


def read_run(folder):
    """Return a run's losses, with the tokens, operations and minutes until then."""
    evals, tokens, minutes = [], 0, 0.0
    for line in read_log(folder):
        if line["event"] in ("start", "resume"):
            settings = line["settings"]
            tokens_per_step = settings["batch_size"] * settings["grad_accum_steps"] * settings["block_size"]
            flops_per_token = line["flops_per_token"]
        elif line["event"] == "step":
            minutes += (line["step"] * tokens_per_step - tokens) / line["tokens_per_second"] / 60
            tokens = line["step"] * tokens_per_step
        elif line["event"] == "eval":
            place = {"tokens": tokens, "flops": tokens * flops_per_token, "time": minutes}
            evals.append(place | {"loss": line["val_loss"]})
    return evals


def draw(runs, x):
    """Draw the runs, {folder: its evaluations}."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis, shown = figure.subplots(), []
    for folder, evals in runs.items():
        losses = [one["loss"] for one in evals]
        label = f"{min(losses):.3f}  {folder}".replace("$", r"\$")
        axis.plot([one[x] for one in evals], losses, label=label)
        shown += losses[len(losses) // 4 :]
    axis.set(ylim=(min(shown) - 0.02, max(shown) + 0.02), xlabel=AXES[x], ylabel="validation loss")
    figure.legend(loc="outside upper center", frameon=False)
    return figure


def main(argv):
    paths = [Path(word) for word in argv if not word.startswith("-")]
    options = read_settings(__file__, [word for word in argv if word.startswith("-")])
    if options["x"] not in AXES:
        raise UserError(f"x = {options['x']!r} is invalid: it must be one of {', '.join(AXES)}")
    runs = {log.parent: read_run(log.parent) for path in paths for log in sorted(path.rglob("log.jsonl"))}
    runs = {folder: evals for folder, evals in runs.items() if evals}
    if not runs:
        raise UserError(f"no evaluated run in: {', '.join(map(str, paths))}")
    with file_errors():
        draw(runs, options["x"]).savefig(options["out"], dpi=120)
    print(f"figure: {options['out']}")


if __name__ == "__main__":
    install_excepthook()
    main(sys.argv[1:])
