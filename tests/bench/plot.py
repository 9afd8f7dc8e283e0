"""
Runs in a table, best first, and their losses in a picture: python tests/bench/plot.py out [--x=flops]

Folders are searched for runs at any depth. Settings that differ between runs have a column. Time is training time,
without evaluating and saving. The picture's range leaves out the first quarter, where losses are high.
"""

import sys
from importlib.util import find_spec
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from config import read_settings
from config.runtime.common import UserError, file_errors, install_excepthook
from runs import read_log

# -----------------------------------------------------------------------------
x = "tokens"  # what the losses are drawn over: tokens, flops or time
train = False  # draw the training losses too, thin
out = "runs.png"  # the picture; its suffix chooses the format
# -----------------------------------------------------------------------------

AXES = {"tokens": ("training tokens", 1), "flops": ("training FLOPs", 1), "time": ("minutes of training", 60)}
# settings without a column, since they cannot change a loss
HIDDEN = {"out_dir", "init_from", "overwrite", "device", "checkpoint_interval", "log_interval", "tensorboard", "wandb"}


def read_run(folder):
    """Return what a run's log says so far, or None if it says nothing yet."""
    lines = read_log(folder)
    if not lines:
        return None
    run = {"folder": str(folder), "parameters": lines[0]["parameters"], "data": lines[0]["data"]["sha256"], "evals": []}
    now = {"tokens": 0, "flops": 0.0, "time": 0.0}
    for line in lines:
        if line["event"] in ("start", "resume"):
            settings = run["settings"] = line["settings"]
            per_step = settings["batch_size"] * settings["grad_accum_steps"] * settings["block_size"]
        elif line["event"] == "step":
            tokens = line["step"] * per_step
            seconds = now["time"] + (tokens - now["tokens"]) / line["tokens_per_second"]
            now = {"tokens": tokens, "flops": tokens * lines[0]["flops_per_token"], "time": seconds}
        elif line["event"] == "eval":
            losses = {"loss": line["val_loss"], "train": line["train_loss"], "bits": line["bits_per_byte"]}
            run["evals"].append(now | losses)
    return run | {"now": now, "best": min(run["evals"], key=lambda one: one["loss"], default=None)}


def short(number, _=None):
    """Return 1638400 as "1.64M"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def print_table(runs, columns):
    rows = [[*columns, "parameters", "tokens", "FLOPs", "tokens/s", "val loss", "bits/byte", "run"]]
    for run in runs:
        now, speed = run["now"], run["now"]["tokens"] / (run["now"]["time"] or inf)
        costs = [f"{run['parameters']:,}", short(now["tokens"]), f"{now['flops']:.2e}", f"{speed:,.0f}"]
        settings = [str(run["settings"].get(name, "-")) for name in columns]
        losses = [f"{run['best'][name]:.4f}" if run["best"] else "-" for name in ("loss", "bits")]
        rows.append([*settings, *costs, *losses, run["folder"]])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for *cells, folder in rows:
        print("   ".join([*(cell.rjust(width) for cell, width in zip(cells, widths)), folder]))
    if len({str(run["data"]) for run in runs}) > 1:
        print("NOTE    the runs are on different data: only their bits per byte compare")


def draw(runs, columns, x, train, path):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    kind = path.suffix.removeprefix(".") or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise UserError(f"out = '{path}' does not work: matplotlib writes no .{kind}")
    name, unit = AXES[x]
    start = max(run["evals"][-1][x] for run in runs) / 4
    later = [one[w] for run in runs for one in run["evals"] if one[x] >= start for w in ("loss", "train")[: 1 + train]]
    for i, run in enumerate(runs):
        places = [one[x] / unit for one in run["evals"]]
        label = ", ".join(f"{name}={run['settings'].get(name)}" for name in columns) or run["folder"]
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3]}
        label = f"{run['best']['loss']:.3f}  {label}".replace("$", r"\$")
        axis.plot(places, [one["loss"] for one in run["evals"]], label=label, **style)
        if train:
            axis.plot(places, [one["train"] for one in run["evals"]], linewidth=0.6, **style)
    margin = 0.03 * (max(later) - min(later)) or 0.01
    axis.set(xlabel=name, ylabel="validation loss" + "; thin: training loss" * train)
    axis.set(xlim=(0, None), ylim=(min(later) - margin, max(later) + margin))
    if x == "tokens":
        axis.xaxis.set_major_formatter(short)
    axis.grid(axis="y", color="0.9")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1) if len(runs) > 4 else (0.5, 1), frameon=False)
    with file_errors():
        figure.savefig(path, dpi=120, format=kind, bbox_inches="tight")
    print(f"picture: {path}")


def main(argv):
    paths = [Path(word) for word in argv if not word.startswith("-")]
    options = read_settings(__file__, [word for word in argv if word.startswith("-")])
    if options["x"] not in AXES:
        raise UserError(f"x = {options['x']!r} does not work: it must be one of {', '.join(AXES)}")
    folders = dict.fromkeys(log.parent for path in paths for log in sorted(path.rglob("log.jsonl")))
    runs = [run for run in map(read_run, folders) if run]
    if not runs:
        raise UserError(f"no run has been logged in {', '.join(map(str, paths)) or 'no folder'}")
    names = dict.fromkeys(name for run in runs for name in run["settings"] if name not in HIDDEN)
    columns = [name for name in names if len({str(run["settings"].get(name)) for run in runs}) > 1]
    runs.sort(key=lambda run: run["best"]["bits"] if run["best"] else inf)
    print_table(runs, columns)
    drawn = [run for run in runs if run["evals"]]
    if drawn and find_spec("matplotlib"):
        draw(drawn, columns, options["x"], options["train"], Path(options["out"]))
    else:
        print(f"NOTE    no picture: {'pip install matplotlib' if drawn else 'no run has been evaluated yet'}")


if __name__ == "__main__":
    install_excepthook()
    main(sys.argv[1:])
