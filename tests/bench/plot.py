"""
Runs in a table, best first, and their losses in a picture: python tests/bench/plot.py out [--x=flops] [--group=seed]

Runs are found at any depth. Settings that differ have a column, if they can change the losses. Time is that of
training, without evaluating and saving. The log has no clock: it is the tokens between two log lines over their
tokens/s, summed up. In the picture a run's first quarter may lie above the rest, which sets the range.
"""

import csv
import json
import math
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from cli import ArgumentParser
from config.runtime.checkpoint import MAY_CHANGE
from config.runtime.common import UserError, file_errors, install_excepthook

AXES = {"tokens": ("training tokens", 1), "flops": ("training FLOPs", 1), "time": ("minutes of training", 60)}
COSTS = ["parameters", "tokens", "FLOPs", "tokens/s", "val loss", "bits/byte"]
# settings without a column of their own: what method and size say, and what a run may change as it goes on
TOLD = {"attention", "qk_scale", "sigma", "residual", "keep_input", "n_layer", "n_embd"}
TOLD |= MAY_CHANGE - {"init_from", "max_iters", "eval_interval", "eval_tokens"}


def find_logs(paths):
    """The logs that `paths` are, or hold at any depth; of several paths those that are neither are passed over."""
    logs = []
    for path in paths:
        if path.is_dir():
            logs += sorted(path.rglob("log.jsonl"))
        elif len(paths) == 1 or not path.exists() or path.suffix == ".jsonl":
            logs.append(path)
    return list(dict.fromkeys(logs))


@file_errors()
def read(path):
    """What a log says of its run, which may be going on; None if it says nothing yet."""
    run = None
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for facts in (json.loads(line) for line in lines if line.endswith("\n")):  # a run may be at the last one
            if facts["event"] in ("start", "resume"):
                run = run or begin(path, facts)
                run["settings"] = dict(facts["settings"])
                run["planned"] = run["settings"]["max_iters"] * run["tokens_per_step"]
            elif facts["event"] == "step":
                tokens = facts["step"] * run["tokens_per_step"]
                run["time"] += (tokens - run["tokens"]) / facts["tokens_per_second"]
                run |= {"tokens": tokens, "flops": tokens * run["flops_per_token"]}
            elif facts["event"] == "eval":
                losses = {"loss": float(facts["val_loss"]), "bits": float(facts["bits_per_byte"])}
                losses["train"] = float(facts["train_loss"])
                run["evals"].append({x: run[x] for x in AXES} | losses)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise UserError(f"{path}: not a log of train.py") from None
    return run and run | {"best": min(run["evals"], key=lambda losses: losses["loss"], default=None)}


def begin(path, facts):
    """A run as the first line of its log has it."""
    settings, data, config = facts["settings"], facts["data"], SimpleNamespace(**facts["config"])
    flops_per_token = float(facts["flops_per_token"])
    tokens_per_step = settings["batch_size"] * settings["grad_accum_steps"] * settings["block_size"]
    tokens = facts["step"] * tokens_per_step  # none, but where the log of the first steps is lost
    kind = {"w2": f" ({config.sigma} σ)", "summed_qk": f" ({config.qk_scale})"}.get(config.attention, "")
    parts = [config.attention + kind, config.residual + " + input" * config.keep_input]
    return {
        "folder": str(path.parent if path.name == "log.jsonl" and path.parent.name else path),
        "method": ", ".join(part for part in parts if not part.startswith("standard")) or "standard",
        "size": f"{config.n_layer} × {config.n_embd}",
        "parameters": int(facts["parameters"]),
        "data": (str(data["sha256"]), str(data["tokenizer"])),
        "text": f"{data['source']}, {data['vocab_size']:,} different tokens ({data['tokenizer']['kind']})",
        "tokens_per_step": tokens_per_step,
        "flops_per_token": flops_per_token,
        "unseen": tokens,
        "tokens": tokens,
        "flops": tokens * flops_per_token,
        "time": 0.0,
        "evals": [],
        "count": 1,
    }


def order(run):
    """What runs are sorted by: different tokens compare by their bits per byte."""
    return run["best"]["bits"] if run["best"] else math.inf


def differing(runs):
    """The names of the settings that differ between runs, in their order; an older run may lack one."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    return [name for name in names if len({repr(run["settings"].get(name)) for run in runs}) > 1]


def grouped(runs, setting):
    """One entry for all runs that differ in `setting` only: means, and the standard deviation of the losses."""
    groups = defaultdict(list)
    for run in runs:
        others = {name: value for name, value in run["settings"].items() if name not in TOLD | {setting}}
        groups[run["method"], run["size"], run["data"], json.dumps(others, sort_keys=True)].append(run)
    return [mean_of(group) for group in groups.values()]


def mean_of(group):
    """A run as the mean of several: their evaluations as far as all have come, their lowest losses, their cost."""
    found = {"evals": [average(losses) for losses in zip(*(run["evals"] for run in group))]}
    found["best"] = average([run["best"] for run in group]) if found["evals"] else None
    found |= {name: min(run[name] for run in group) for name in ("tokens", "flops", "unseen")}
    found["time"] = mean(run["time"] for run in group)
    return group[0] | found | {"folder": " ".join(run["folder"] for run in group), "count": len(group)}


def average(losses):
    """The mean of each number, and the standard deviation `sd` of the validation loss."""
    spread = stdev(one["loss"] for one in losses) if len(losses) > 1 else 0.0
    return {name: mean(one[name] for one in losses) for name in losses[0]} | {"sd": spread}


def name_runs(runs, columns):
    """Gives runs labels, with their folders where settings do not tell, and marks where their data differ."""
    kinds = list(dict.fromkeys(run["data"] for run in runs))
    for run in runs:
        settings = (f"{name}={run['settings'].get(name)}" for name in columns if name != "dataset")
        run["label"] = ", ".join([run["method"], run["size"], *settings])
    labels = [run["label"] for run in runs]
    for run, label in zip(runs, labels):
        run["label"] = label + f" ({run['folder']})" * (labels.count(label) > 1)
        run["mark"] = f" [{kinds.index(run['data']) + 1}]" * (len(kinds) > 1)


def short(number, _=None):
    """1638400 -> "1.64M"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def loss_of(run, digits):
    """ "1.6270", or of several runs "1.6270 ± 0.0031 (3)"; the mark of the data behind it."""
    spread = f" ± {run['best']['sd']:.{digits}f} ({run['count']})" if run["count"] > 1 else ""
    return f"{run['best']['loss']:.{digits}f}{spread}{run['mark']}"


def print_table(runs, columns):
    rows = [["method", "size", *columns, *COSTS, "run"]]
    for run in runs:
        tokens = short(run["tokens"]) + f" of {short(run['planned'])}" * (run["tokens"] < run["planned"])
        speed = f"{(run['tokens'] - run['unseen']) / run['time']:,.0f}" if run["time"] else "-"
        best = [loss_of(run, 4), f"{run['best']['bits']:.4f}"] if run["best"] else ["-", "-"]
        settings = [str(run["settings"].get(name, "-")) for name in columns]
        costs = [f"{run['parameters']:,}", tokens, f"{run['flops']:.2e}".replace("e+", "e"), speed]
        rows.append([run["method"], run["size"], *settings, *costs, *best, run["folder"]])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for method, *numbers, folder in rows:
        numbers = [number.rjust(width) for number, width in zip(numbers, widths[1:])]
        print("   ".join([method.ljust(widths[0]), *numbers, folder]))
    for mark, text in dict.fromkeys((run["mark"], run["text"]) for run in runs if run["mark"]):
        print(f"NOTE   {mark} {text}: losses compare only with those of the same mark")


@file_errors()
def write_csv(runs, path):
    """All runs, one a line: what they are, every setting that differs, what they cost, and their losses."""
    settings = differing(runs)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        losses = [f"{when}_{loss}" for when in ("best", "last") for loss in ("val_loss", "train_loss", "bits_per_byte")]
        writer.writerow(["run", "method", "size", *settings, "parameters", "tokens", "flops", "seconds", *losses])
        for run in runs:
            values = (run["settings"].get(name) for name in settings)
            costs = [run[name] for name in ("parameters", "tokens", "flops", "time")]
            at = (run["best"], run["evals"][-1]) if run["best"] else ()
            losses = [one[name] for one in at for name in ("loss", "train", "bits")]
            writer.writerow([run["folder"], run["method"], run["size"], *values, *costs, *losses])
    print(f"table: {path}")


def draw(runs, x, train, path):
    """The validation losses of `runs`, and thin the training losses if `train`, over their tokens, flops or time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    name, unit = AXES[x]
    figure, axis = pyplot.subplots(figsize=(8, 5))
    later = []  # losses
    for i, run in enumerate(runs):
        places = [losses[x] / unit for losses in run["evals"]]
        label = f"{loss_of(run, 3)}  {run['label']}".replace("$", r"\$")
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "marker": "o", "markersize": 4}
        for kind, width in (("loss", 1.5), ("train", 0.6))[: 1 + train]:
            curve = [losses[kind] for losses in run["evals"]]
            later += [loss for place, loss in zip(places, curve) if place >= places[-1] / 4]
            axis.plot(places, curve, label=label, markevery=[-1], linewidth=width, **style)
            label = None
        if run["count"] > 1:
            low, high = ([one["loss"] + sign * one["sd"] for one in run["evals"]] for sign in (-1, 1))
            axis.fill_between(places, low, high, color=style["color"], alpha=0.2, linewidth=0)
    margin = 0.03 * (max(later) - min(later)) or 0.01
    axis.set(xlabel=name, ylabel="validation loss" + "; thin: training loss" * train)
    axis.set_ylim(min(later) - margin, max(later) + margin)
    axis.set_xlim(left=0)
    if x == "tokens":
        axis.xaxis.set_major_formatter(short)
    axis.grid(axis="y", color="0.9")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    with file_errors():
        figure.savefig(path, dpi=120, format=path.suffix.removeprefix(".") or "png", bbox_inches="tight")
    print(f"picture: {path}")


if __name__ == "__main__":
    install_excepthook()
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or their log.jsonl")
    parser.add_argument("--x", choices=AXES, default="tokens", help="what the losses are drawn over (default: tokens)")
    parser.add_argument("--train", action="store_true", help="draw the training losses too, thin")
    parser.add_argument("--group", metavar="SETTING", help="mean ± sd of runs that differ in this only, such as seed")
    parser.add_argument("--csv", type=Path, help="a file for all runs, their settings that differ, and their losses")
    parser.add_argument("--out", type=Path, help="the picture (default: runs.png)")
    args = parser.parse_args()

    runs = [run for run in map(read, find_logs(args.runs)) if run]
    if not runs:
        raise UserError(f"{' '.join(map(str, args.runs))}: no run has been logged yet")
    if args.group and not any(args.group in run["settings"] for run in runs):
        raise UserError(f"--group={args.group}: there is no such setting in these runs")
    runs.sort(key=order)
    if args.csv:
        write_csv(runs, args.csv)
    columns = [name for name in differing(runs) if name not in TOLD | {args.group}]
    if args.group:
        runs = sorted(grouped(runs, args.group), key=order)
    name_runs(runs, columns)
    print_table(runs, columns)

    drawn = [run for run in runs if run["best"]]
    longest = max((run["evals"][-1][args.x] for run in drawn), default=0)
    for run in [run for run in drawn if run["evals"][-1][args.x] < longest / 20]:  # its losses would set the range
        drawn.remove(run)
        print(f"NOTE    {run['folder']} is not drawn: it is too short beside the others")
    lacking = "" if drawn else "nothing to draw: no run has come to an evaluation yet"
    if drawn and not find_spec("matplotlib"):
        lacking = "a picture needs matplotlib: pip install matplotlib"
    if lacking and args.out:
        raise UserError(lacking)
    if lacking:
        print(f"NOTE    {lacking}")
    else:
        draw(drawn, args.x, args.train, args.out or Path("runs.png"))
