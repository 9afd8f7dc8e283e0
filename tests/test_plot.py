"""plot.py draws the losses of runs."""

import sys
from pathlib import Path

from conftest import ROOT, TINY, error_of, log_of

sys.path.insert(0, str(ROOT / "tests" / "bench"))  # as Python does for a program there

from plot import read_run

PLOT = str(ROOT / "tests" / "bench" / "plot.py")


def test_runs_in_one_picture(repo, capsys):
    """The FLOPs of training until each evaluation, also where a run has resumed, and the loss."""
    run = f"train.py {TINY} --lr_decay=none"
    repo(f"{run} --out_dir=out/a")
    repo(f"{run} --out_dir=out/a --init_from=resume --max_iters=8")
    (*_, operations), (*_, loss) = read_run(Path("out/a"))
    assert loss == log_of("out/a", "eval")[-1]["val_loss"]
    assert operations == 8 * 2 * 16 * log_of("out/a", "start")[0]["flops_per_token"]

    repo(f"{run} --out_dir=out/deeper/b$_{{x$")
    assert "no evaluated run in: nowhere" in error_of(repo, [PLOT, "nowhere"], capsys)
    assert repo([PLOT, "out", "--out=both.svg"]).endswith("figure: both.svg\n")
    assert Path("both.svg").read_bytes().startswith(b"<?xml")
