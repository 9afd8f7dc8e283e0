"""
The losses of runs in one picture: python tests/bench/plot.py out [--x=time]

Folders are searched for runs at any depth. The legend has each run's lowest validation loss and the settings in which
runs differ. Time is training time, without evaluating and saving. The y axis fits the last three quarters.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from config import read_settings
from config.runtime.errors import UserError, file_errors, install_excepthook
from runs import read_log

# -----------------------------------------------------------------------------
x = "tokens"  # x axis: tokens, flops or time
train = False  # draw the training losses too, thin
out = "runs.png"  # the picture; its suffix chooses the format
# -----------------------------------------------------------------------------

AXES = {"tokens": "training tokens", "flops": "training FLOPs", "time": "minutes of training"}
# settings that cannot change a loss
HIDDEN = {"out_dir", "init_from", "overwrite", "device", "checkpoint_interval", "log_interval", "tensorboard", "wandb"}


def read_run(folder):
    """Return a run's settings, and its losses with the tokens, operations and minutes until then."""
    run, tokens, minutes = {"folder": str(folder), "evals": []}, 0, 0.0
    for line in read_log(folder):
        if line["event"] in ("start", "resume"):
            settings = run["settings"] = line["settings"]
            tokens_per_step = settings["batch_size"] * settings["grad_accum_steps"] * settings["block_size"]
            flops_per_token = line["flops_per_token"]
        elif line["event"] == "step":
            minutes += (line["step"] * tokens_per_step - tokens) / line["tokens_per_second"] / 60
            tokens = line["step"] * tokens_per_step
        elif line["event"] == "eval":
            place = {"tokens": tokens, "flops": tokens * flops_per_token, "time": minutes}
            run["evals"].append(place | {"loss": line["val_loss"], "train": line["train_loss"]})
    return run


def draw(runs, x, train, path):
    names = dict.fromkeys(name for run in runs for name in run["settings"] if name not in HIDDEN)
    differ = [name for name in names if len({str(run["settings"].get(name)) for run in runs}) > 1]
    figure = Figure(figsize=(8, 5))
    axis = figure.subplots()
    for i, run in enumerate(runs):
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3]}
        label = ", ".join(f"{name}={run['settings'].get(name)}" for name in differ) or run["folder"]
        lowest = min(one["loss"] for one in run["evals"])
        label = f"{lowest:.3f}  {label}".replace("$", r"\$")
        places = [one[x] for one in run["evals"]]
        axis.plot(places, [one["loss"] for one in run["evals"]], label=label, **style)
        if train:
            axis.plot(places, [one["train"] for one in run["evals"]], linewidth=0.6, **style)
    start = max(run["evals"][-1][x] for run in runs) / 4
    later = [one for run in runs for one in run["evals"] if one[x] >= start]
    losses = [one[name] for one in later for name in ("loss", "train")[: 1 + train]]
    margin = 0.03 * (max(losses) - min(losses)) or 0.01
    axis.set(xlim=(0, None), ylim=(min(losses) - margin, max(losses) + margin))
    axis.set(xlabel=AXES[x], ylabel="validation loss" + "; thin: training loss" * train)
    if x != "time":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.grid(axis="y", color="0.9")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1) if len(runs) > 4 else (0.5, 1), frameon=False)
    with file_errors():
        figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"picture: {path}")


def main(argv):
    paths = [Path(word) for word in argv if not word.startswith("-")]
    options = read_settings(__file__, [word for word in argv if word.startswith("-")])
    if options["x"] not in AXES:
        raise UserError(f"x = {options['x']!r} does not work: it must be one of {', '.join(AXES)}")
    folders = dict.fromkeys(log.parent for path in paths for log in sorted(path.rglob("log.jsonl")))
    runs = [run for run in map(read_run, folders) if run["evals"]]
    if not runs:
        raise UserError(f"no run has been evaluated in {', '.join(map(str, paths)) or 'no folder'}")
    draw(runs, options["x"], options["train"], options["out"])


if __name__ == "__main__":
    install_excepthook()
    main(sys.argv[1:])
