"""Training runs in one picture: python tests/bench/plot.py out/*/log.jsonl [--out=runs.png]"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from config.runtime.common import ArgumentParser, install_excepthook


def read(path):
    """Of a run's log (steps, training losses) and (steps, validation losses)."""
    losses, evaluations = [], []
    try:
        lines = path.read_text().splitlines(keepends=True)
        for facts in (json.loads(line) for line in lines if line.endswith("\n")):  # a run may be at the last one
            if facts["event"] == "step" and facts["loss"] is not None:
                losses.append((float(facts["step"]), float(facts["loss"])))
            elif facts["event"] == "eval":
                evaluations.append((float(facts["step"]), float(facts["val_loss"])))
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
        raise ValueError(f"{path}: not a log of train.py") from None
    if not losses:
        raise ValueError(f"{path}: no step has been logged yet")
    return losses, evaluations


if __name__ == "__main__":
    install_excepthook()
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("logs", nargs="+", type=Path, metavar="log.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs.png"), help="the picture (default: runs.png)")
    args = parser.parse_args()
    if not find_spec("matplotlib"):
        raise ValueError("plotting needs matplotlib: pip install matplotlib")
    runs = {path: read(path) for path in args.logs}

    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    for i, (path, (losses, evaluations)) in enumerate(runs.items()):
        axis.plot(*zip(*losses), color=f"C{i}", linewidth=0.5, alpha=0.5)
        if evaluations:
            axis.plot(*zip(*evaluations), color=f"C{i}", marker=".")
        axis.plot([], [], color=f"C{i}", label=path.resolve().parent.name.replace("$", r"\$"))
    axis.set_xlabel("steps")
    axis.set_ylabel("loss: training (thin), validation (dots)")
    axis.legend(fontsize=8)
    figure.savefig(args.out, dpi=120, format=args.out.suffix.removeprefix(".") or "png")
    print(args.out)
