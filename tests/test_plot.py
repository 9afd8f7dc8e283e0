"""plot.py draws the losses of runs, and differences with their intervals."""

import json
import re
import shutil
from pathlib import Path

import pytest

from conftest import ROOT, TEXT, TINY, error_of, log_of, prepare
from plot import draw_differences, draw_losses, read_run

PLOT = str(ROOT / "tests" / "bench" / "plot.py")
RUN = f"train.py {TINY} --lr_decay=none"


def test_runs_in_one_picture(repo):
    """The FLOPs of training until each evaluation, also where a run has resumed, and the loss."""
    repo(f"{RUN} --out_dir=out/a")
    repo(f"{RUN} --out_dir=out/a --init_from=resume --max_iters=8")
    _, (*_, last), (*_, operations) = read_run(Path("out/a"))
    assert last == log_of("out/a", "eval")[-1]
    assert operations == 8 * 2 * 16 * log_of("out/a", "start")[0]["flops_per_token"]

    repo(f"{RUN} --out_dir=out/deeper/b$_{{x$")
    assert repo([PLOT, "out", "--out=both.svg"]) == "figure: both.svg\n"
    assert Path("both.svg").read_bytes().startswith(b"<?xml")


def test_a_run_that_is_not_drawn_is_named(repo, capsys):
    repo(f"{RUN} --out_dir=out/a")
    whole = Path("out/a/log.jsonl").read_text().splitlines(keepends=True)
    uncounted = [json.dumps(json.loads(line) | {"flops_per_token": None}) + "\n" for line in whole]
    for name, lines in ("b", whole[:1]), ("c", uncounted):  # while it trains; with an edit that uses .item()
        Path("out", name).mkdir()
        Path("out", name, "log.jsonl").write_text("".join(lines))
    shown = repo([PLOT, "out", "--out=a.v2"])
    assert re.findall("out/(.) is left out|figure: (.*)", shown) == [("b", ""), ("c", ""), ("", "a.v2.png")]
    assert "nothing to draw in: out/b" in error_of(repo, [PLOT, "out/b"], capsys)
    assert "nowhere holds no run: name folders of" in error_of(repo, [PLOT, "out/a", "nowhere"], capsys)


@pytest.mark.parametrize("tokenizer, measure, unit", [
    ("char", "val_loss", "nats per token"),
    ("bpe", "bits_per_byte", "bits per byte of text"),
])  # fmt: skip
def test_different_tokens_are_compared_in_bits_per_byte(repo, tokenizer, measure, unit):
    prepare(repo.folder / "data" / "other", TEXT, "test", tokenizer, 270 if tokenizer == "bpe" else 0)
    repo(f"{RUN} --out_dir=out/a")
    repo(f"{RUN} --out_dir=out/b --dataset=other")
    (axis,) = draw_losses([Path("out")]).axes
    assert axis.get_ylabel() == f"validation loss ({unit})"
    for folder, line in zip(("out/a", "out/b"), axis.lines, strict=True):
        assert list(line.get_ydata()) == [evaluation[measure] for evaluation in log_of(folder, "eval")]


def test_the_legend_of_many_runs_leaves_the_axes_as_they_are(repo):
    repo(f"{RUN} --out_dir=out/0")
    (one,) = draw_losses([Path("out")]).axes
    for number in range(1, 24):
        shutil.copytree("out/0", f"out/{'a long name ' * 9}{number}")
    (axis,) = draw_losses([Path("out")]).axes
    assert axis.get_window_extent().bounds == one.get_window_extent().bounds
    assert not axis.get_legend().get_window_extent().overlaps(axis.get_window_extent())
    assert len({tuple(line.get_color()) for line in axis.lines if line.get_marker() == "."}) == 24


def test_differences_and_their_intervals():
    (axis,) = draw_differences({"one": {5: (0.5, 0.25), 20: (-1, 0.5)}, "other": {5: (2, 1), 20: (0, 1)}}).axes
    for container, differences, intervals in zip(
        axis.containers, ([0.5, -1], [2, 0]), ([[0.25, 0.75], [-1.5, -0.5]], [[1, 3], [-1, 1]]), strict=True
    ):
        line, _, (bars,) = container.lines
        assert list(line.get_ydata()) == differences
        assert [list(bar[:, 1]) for bar in bars.get_segments()] == intervals
