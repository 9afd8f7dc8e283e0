"""
Runs in a table, best first, and their validation losses in a picture: python tests/bench/plot.py out/* [--x=flops]

Time is that of training, without evaluating and saving. The log has no clock: it is the tokens between two log lines
over their tokens/s, summed up. In the picture a run's first quarter may lie above the rest, which sets the range.
"""

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from config.runtime.common import ArgumentParser, install_excepthook
from data.console import UserError, file_errors
from model import GPT, GPTConfig

AXES = {"tokens": ("training tokens", 1), "flops": ("training FLOPs", 1), "time": ("minutes of training", 60)}
HEAD = ["method", "size", "parameters", "tokens", "FLOPs", "tokens/s", "val loss", "bits/byte", "run"]


@file_errors()
def read(path):
    """What a log says of its run, which may be going on; None if it says nothing yet."""
    run = None
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for facts in (json.loads(line) for line in lines if line.endswith("\n")):  # a run may be at the last one
            if facts["event"] in ("start", "resume"):
                run = run or begin(path, facts)
                run["planned"] = facts["settings"]["max_iters"] * run["tokens_per_step"]
            elif facts["event"] == "step":
                tokens = facts["step"] * run["tokens_per_step"]
                run["time"] += (tokens - run["tokens"]) / facts["tokens_per_second"]
                run |= {"tokens": tokens, "flops": tokens * run["flops_per_token"]}
            elif facts["event"] == "eval":
                losses = {"loss": float(facts["val_loss"]), "bits": float(facts["bits_per_byte"])}
                run["evals"].append({x: run[x] for x in AXES} | losses)
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise UserError(f"{path}: not a log of train.py") from None
    return run and run | {"best": min(run["evals"], key=lambda losses: losses["loss"], default=None)}


def begin(path, facts):
    """A run as the first line of its log has it."""
    settings, data, config = facts["settings"], facts["data"], GPTConfig(**facts["config"])
    with torch.device("meta"):  # nothing is computed
        flops_per_token = GPT(config).flops_per_token()
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
    }


def name_runs(runs):
    """Gives runs labels, with their folders where method and size do not tell, and marks where their data differ."""
    kinds = list(dict.fromkeys(run["data"] for run in runs))
    labels = [f"{run['method']}, {run['size']}" for run in runs]
    for run, label in zip(runs, labels):
        run["label"] = label + f" ({run['folder']})" * (labels.count(label) > 1)
        run["mark"] = f" [{kinds.index(run['data']) + 1}]" * (len(kinds) > 1)


def short(number, _=None):
    """1638400 -> "1.64M"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def print_table(runs):
    rows = [HEAD]
    for run in runs:
        tokens = short(run["tokens"]) + f" of {short(run['planned'])}" * (run["tokens"] < run["planned"])
        costs = [tokens, f"{run['flops']:.2e}".replace("e+", "e")]
        speed = f"{(run['tokens'] - run['unseen']) / run['time']:,.0f}" if run["time"] else "-"
        best = [f"{run['best']['loss']:.4f}{run['mark']}", f"{run['best']['bits']:.4f}"] if run["best"] else ["-", "-"]
        rows.append([run["method"], run["size"], f"{run['parameters']:,}", *costs, speed, *best, run["folder"]])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for method, *numbers, folder in rows:
        numbers = [number.rjust(width) for number, width in zip(numbers, widths[1:])]
        print("   ".join([method.ljust(widths[0]), *numbers, folder]))
    for mark, text in dict.fromkeys((run["mark"], run["text"]) for run in runs if run["mark"]):
        print(f"NOTE   {mark} {text}: losses compare with those of the same mark alone")


def draw(runs, x, path):
    """The validation losses of `runs` over their tokens, flops or time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    name, unit = AXES[x]
    figure, axis = pyplot.subplots(figsize=(8, 5))
    later = []  # losses
    for i, run in enumerate(runs):
        curve = [(losses[x] / unit, losses["loss"]) for losses in run["evals"]]
        later += [loss for place, loss in curve if place >= curve[-1][0] / 4]
        label = f"{run['best']['loss']:.3f}{run['mark']}  {run['label']}".replace("$", r"\$")
        style = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10 % 3], "marker": "o", "markersize": 4}
        axis.plot(*zip(*curve), label=label, markevery=[-1], **style)
    margin = 0.03 * (max(later) - min(later)) or 0.01
    axis.set(xlabel=name, ylabel="validation loss", ylim=(min(later) - margin, max(later) + margin))
    axis.set_xlim(left=0)
    if x == "tokens":
        axis.xaxis.set_major_formatter(short)
    axis.grid(axis="y", color="0.9")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=120, format=path.suffix.removeprefix(".") or "png", bbox_inches="tight")
    print(f"picture: {path}")


if __name__ == "__main__":
    install_excepthook()
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or their log.jsonl; others are passed over")
    parser.add_argument("--x", choices=AXES, default="tokens", help="what the losses are drawn over (default: tokens)")
    parser.add_argument("--out", type=Path, help="the picture (default: runs.png)")
    args = parser.parse_args()

    logs = [path / "log.jsonl" if path.is_dir() else path for path in args.runs]
    if len(logs) > 1:  # out/* may hold other things than runs
        logs = [log for path, log in zip(args.runs, logs) if not path.exists() or log.name.endswith(".jsonl") and log.exists()]
    runs = [run for run in map(read, dict.fromkeys(logs)) if run]
    if not runs:
        raise UserError(f"{' '.join(map(str, args.runs))}: no run has been logged yet")
    runs.sort(key=lambda run: run["best"]["bits"] if run["best"] else math.inf)
    name_runs(runs)
    print_table(runs)

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
        draw(drawn, args.x, args.out or Path("runs.png"))
