"""What the documents show must work, and what they say of runs must be what the runs say."""

import csv
import importlib
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from config import RULE, split_settings
from conftest import TINY, log_of

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "tests" / "bench"
PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in ("config", "data"))]
PAGES += (ROOT / "tests").glob("**/*.md")
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
README, OF_RUNS, RESULTS = (TEXTS[page] for page in ("README.md", "config/README.md", "tests/bench/RESULTS.md"))
WORDS = {"README.md": 1200, "tests/bench/RESULTS.md": 2400, "tests/README.md": 700, "tests/EXTENDING.md": 600}
OUR_PROGRAM = re.compile(
    r"^ {4}(?:\w+=\S+ |pip .*&& )?(?:python|torchrun --\S+ --\S+) ((?:\w+/)*\w+\.py.*)", re.MULTILINE
)
COMMANDS = [(page, found) for page, text in TEXTS.items() for found in OUR_PROGRAM.findall(text) if "..." not in found]
BLOCK_SNIPPET, RUN_SNIPPET = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_pages_are_short():
    words = {page: len(re.sub(r"<!--.*?-->", "", text).split()) for page, text in TEXTS.items()}
    assert {page: count for page, count in words.items() if count > WORDS.get(page, math.inf)} == {}
    assert sum(words.values()) <= 8300


def test_the_columns_of_the_log_are_all_there(repo):
    repo(f"train.py {TINY} --out_dir=run")
    repo("train.py --init_from=resume --out_dir=run --max_iters=5")
    columns = set()
    for line in log_of("run"):
        columns |= {line["event"], *line}
    assert [name for name in columns if f"`{name}`" not in OF_RUNS] == []


def test_a_run_is_shared_as_model_and_checkpoint(repo, tmp_path, monkeypatch):
    repo(f"train.py {TINY} --attention=w2 --residual=m1 --out_dir=out/run")
    for name in ("model.py", "out/run/best.pt"):
        shutil.copy(name, tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PYTHONUTF8", "1")
    command = [sys.executable, "-c", RUN_SNIPPET]
    text = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert text.startswith("the")
    assert len(text) > 100


def test_a_block_by_itself():
    shown = {}
    exec(BLOCK_SNIPPET, shown)
    assert shown["out"].shape == (2, 64, 512) and shown["out"].isfinite().all()


@pytest.mark.parametrize("page", TEXTS)
def test_files_they_name_exist(page):
    for name in re.findall(r"(?:config|data|tests)/\w+(?:/\w+)?\.(?:py|txt)\b", TEXTS[page]):
        made_by_the_reader = "NAME" in name or name.endswith("/input.txt")
        assert made_by_the_reader or (ROOT / name).exists(), name


@pytest.mark.parametrize("page", TEXTS)
def test_links_resolve(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page])]
    for link in links:
        assert link.startswith("https://") or (ROOT / page).parent.joinpath(link).exists(), link


@pytest.mark.parametrize("page, command", COMMANDS)
def test_commands_parse(page, command, monkeypatch):
    """Every setting in them exists, and so does every config file."""
    monkeypatch.syspath_prepend(BENCH)
    program, *arguments = shlex.split(command, comments=True)
    assert (ROOT / program).is_file()
    files = [argument for argument in arguments if not argument.startswith("-")]
    if program.endswith("compare.py"):
        options, words, common = importlib.import_module("compare").read_arguments(arguments)
        assert len(words) > 1 or options["against"]
        for text in words:
            importlib.import_module("variants").read_words(text, common)
    elif program.endswith("speed.py"):
        for text in files:
            importlib.import_module("variants").read_words(text, [])
    elif RULE in (ROOT / program).read_text(encoding="utf-8"):
        of_another_kind = files if program != "train.py" else []  # texts, tasks
        split_settings(ROOT / program, [argument for argument in arguments if argument not in of_another_kind])


def test_the_commands_of_the_first_page_work(repo):
    for name in ("my.txt", "new.txt"):
        shutil.copy("data/shakespeare_char/input.txt", name)
    tiny = {"train.py": TINY.split(), "sample.py": ["--max_new_tokens=3", "--device=cpu"]}
    for page, command in COMMANDS:
        program, *arguments = shlex.split(command.replace("=1600", "=6"), comments=True)
        if page == "README.md" and "compare.py" not in program:
            assert "new weights" not in repo([program, *tiny.get(program, []), *arguments])
    for run in ("m1_shakespeare", "plays-m1", "new", "m1_shakespeare-size_gpu", "m4_1_shakespeare"):
        assert Path(f"out/{run}/ckpt.pt").exists()


def test_qk_norm_is_shown_as_in_its_diff():
    diff = (BENCH / "ideas" / "qk_norm.diff").read_text(encoding="utf-8")
    lines = re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1].split("\n")
    assert [line for line in lines if line not in diff.split("\n")] == []
    assert [line for line in lines if line] == re.findall(
        r"^[+-](?![+-]).*", diff.partition("tests/reference.py")[0], re.M
    )


# -- numbers ---------------------------------------------------------------------------------------------------


def section_of(text, title):
    """Return the section whose title begins like this."""
    (section,) = [section for section in text.split("\n## ") if section.startswith(title)]
    return section


def rows_of(text):
    """Return the rows of a text's tables, without headings: lists of cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    headings = {i - 1 for i, row in enumerate(rows) if set(row[0]) <= set("-") and row[0] or set(row[-1]) == {"-"}}
    return [row for i, row in enumerate(rows) if i not in headings and i - 1 not in headings]


def read_runs(file, **settings):
    with open(BENCH / "results" / f"{file}.csv", newline="", encoding="utf-8") as lines:
        return [run for run in csv.DictReader(lines) if settings.items() <= run.items()]


def gain(baseline, candidate, level=0.95, paired=False):
    test = stats.ttest_rel(baseline, candidate) if paired else stats.ttest_ind(baseline, candidate, equal_var=False)
    interval = test.confidence_interval(level)
    return f"{np.mean(baseline) - np.mean(candidate):+.3f} ± {(interval.high - interval.low) / 2:.3f}"


def comparison(file, steps, loss="loss", **settings):
    """Return {variant: [cost, break-even, gain]} of the runs with these settings, as RESULTS.md shows them."""
    losses, flops, by_length = defaultdict(list), {}, defaultdict(list)
    for run in read_runs(file, **settings):
        if run["stage"] == "main" and int(run["max_iters"]) == steps:
            losses[run["candidate"]].append(float(run[loss]))
            flops[run["candidate"]] = float(run["flops"])
        if run["stage"] in ("main", "ladder") and run["candidate"] == "standard":
            by_length[int(run["max_iters"])].append(float(run["loss"]))
    lengths = sorted(by_length)
    curve = [np.mean(by_length[length]) for length in lengths]
    rows = {}
    for name, found in losses.items():
        cost = flops[name] / flops["standard"]
        break_even = np.mean(losses["standard"]) - np.interp(math.log(cost * steps), np.log(lengths), curve)
        rows[name] = [f"{cost:.2f}", f"{break_even:.3f}", gain(losses["standard"], found)]
    return rows


def board(file, level, **costs):
    """Return {variant: [cost, gain at equal operations]}: over the longest baseline up to its cost, on its seeds.

    At equal steps, runs are paired by seed.
    """
    losses, flops = defaultdict(dict), {}
    for run in read_runs(file):
        if run["seed"] != "0":
            losses[run["variant"], int(run["steps"])][run["seed"]] = float(run["loss"])
            flops[run["variant"], int(run["steps"])] = float(run["flops"])
    (base, steps), *_ = losses
    lengths, rows = sorted(length for name, length in losses if name == base), {}
    for (name, length), found in losses.items():
        if name == base:
            continue
        cost = costs.get(name) or flops[name, steps] / flops[base, steps]
        longest = max(length for length in lengths if length <= 1.005 * cost * steps)
        baseline = losses[base, longest]
        pairs = [(baseline[seed], loss) for seed, loss in found.items() if seed in baseline]
        rows[name] = [f"{cost:.2f}", gain(*zip(*pairs), level, paired=longest == steps)]
    return rows


def test_gains_are_those_of_the_runs():
    characters, pairs = (comparison("methods", 400, dataset=f"shakespeare_{name}") for name in ("char", "bpe"))
    deep = comparison("depth", 1000, n_embd="256")
    shown = rows_of(section_of(RESULTS, "Do Methods"))
    expected = [[name, *characters[name], pairs[name][2], *deep.get(name, [""] * 3)] for name, *_ in shown]
    assert shown == expected and len(shown) >= 8

    lengths = [comparison("growth", steps) for steps in (400, 1600, 6400)]
    shown = rows_of(section_of(RESULTS, "Does a gain grow"))
    expected = [[name, lengths[0][name][0], *(rows[name][2] for rows in lengths)] for name, *_ in shown]
    assert shown == expected and len(shown) == 6

    lowest, last = (comparison("converged", 1350, loss, dropout="0.3") for loss in ("best_loss", "loss"))
    shown = rows_of(section_of(RESULTS, "How low"))
    assert shown == [[name, lowest[name][0], lowest[name][2], last[name][2]] for name, *_ in shown] and len(shown) == 7


NAMES = {"Muon": "muon", "W2 (distance)": "w2_shakespeare", "Method 5.2": "m5.2", "Method 3.1, input kept": "m3.1_kept"}


def test_the_board_is_that_of_the_runs():
    wide, deep = board("ideas", 0.9779, muon=1.23), board("ideas_deep", 0.9706, muon=1.1)
    for name, *cells in rows_of(section_of(RESULTS, "Which published ideas")):
        name = NAMES.get(name) or re.fullmatch(r"\[(\w+)\].*", name)[1]
        assert cells == [*wide.pop(name), deep.get(name, [""])[-1]], name
    assert not wide


@pytest.mark.parametrize("name", ["recall", "entailment", "micro"])
def test_tables_of_tasks_are_those_of_the_runs(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCH)
    tasks = importlib.import_module("tasks")
    monkeypatch.setattr(tasks, "trial", lambda *_: pytest.skip("runs are missing in tests/bench/results"))
    tasks.main([name, f"--out={BENCH}/results"])
    printed = [row for row in rows_of(capsys.readouterr().out) if "±" in "".join(row)]
    shown = [row for row in rows_of(section_of(RESULTS, "Does W2")) if "±" in "".join(row)]
    of_page = [row for row in shown if any(row[0] == one[0] and set(row[1:]) <= {*one, ""} for one in printed)]
    assert len(of_page) >= 2


def test_the_results_on_the_first_page_are_among_them():
    numbers = re.findall(r"[-+]\d\.\d{3} ± \d\.\d{3}", README)
    assert len(numbers) > 10
    assert [number for number in numbers if number not in RESULTS] == []
