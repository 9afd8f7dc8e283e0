"""What the READMEs show must work."""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from config import RULE, split_settings
from conftest import TINY, log_of

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "tests" / "bench"
PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in ("config", "data"))]
PAGES += (ROOT / "tests").glob("**/*.md")
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
README, OF_RUNS = TEXTS["README.md"], TEXTS["config/README.md"]
OUR_PROGRAM = re.compile(r"^ {4}(?:\w+=\S+ )?(?:python|torchrun --\S+ --\S+) ((?:\w+/)*\w+\.py.*)", re.MULTILINE)
COMMANDS = [(page, found) for page, text in TEXTS.items() for found in OUR_PROGRAM.findall(text)]
(SNIPPET,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


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
    command = [sys.executable, "-c", SNIPPET]
    text = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert text.startswith("the")
    assert len(text) > 100


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


def is_of_a_study(page, command):
    """A finished study's comparisons were made by the compare.py of its own commit."""
    return "/studies/" in page and "compare.py" in command


TO_PARSE = [(page, command) for page, command in COMMANDS if "..." not in command and not is_of_a_study(page, command)]


@pytest.mark.parametrize("page, command", TO_PARSE)
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


def test_the_commands_on_ones_own_text_work(repo):
    section = README[README.index("## Your own text") : README.index("## Using model.py elsewhere")]
    for name in ("my.txt", "new.txt"):
        shutil.copy("data/shakespeare_char/input.txt", name)
    tiny = {"train.py": TINY.split(), "sample.py": ["--max_new_tokens=3", "--device=cpu"]}
    for command in OUR_PROGRAM.findall(section):
        program, *arguments = shlex.split(command, comments=True)
        printed = repo([program, *tiny.get(program, []), *arguments])
    assert "new weights" not in printed
    assert Path("out/new/ckpt.pt").exists()


def rows_of(text):
    """Return the rows of results in a text's tables: lists of cells."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "±" in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def foreign_rows(page, shown):
    """Return the page's rows that are not those shown with the same name. A page may leave out cells and join rows."""
    of_name = {}
    for name, *cells in rows_of(shown):
        of_name.setdefault(name, []).extend(cells)
    foreign = []
    for name, *cells in rows_of(page):
        rest = iter(of_name.get(name, []))
        if not all(cell in rest for cell in cells):  # in this order
            foreign.append([name, *cells])
    return foreign


@pytest.mark.parametrize("name", ["recall", "entailment"])
def test_tables_of_tasks_are_those_of_the_results(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCH)
    importlib.import_module("tasks").main([name, f"--out={BENCH}/results"])
    page = TEXTS[f"tests/bench/studies/{name}.md"]
    assert len(rows_of(page)) >= 8 and foreign_rows(page, capsys.readouterr().out) == []


def test_tables_of_speed_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    speed, shown = importlib.import_module("speed"), ""
    for path in BENCH.glob("results/speed_*.json"):
        tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
        shown += "\n".join(speed.markdown(*section) for section in tables.items())
    page = TEXTS["tests/bench/studies/speed.md"]
    rows = [line for line in page.splitlines() if re.match(r"\|.*\d", line)]
    assert len(rows) >= 10
    assert [row for row in rows if row not in shown] == []


def test_the_results_on_the_first_page_are_those_of_the_studies():
    section = README[README.index("## What pays") : README.index("## Configs")]
    numbers = re.findall(r"-?\d\.\d{3}(?: ± \d\.\d{3})?", section)
    studies = "".join(text for page, text in TEXTS.items() if "studies/" in page)
    assert len(numbers) > 6
    assert [number for number in numbers if number not in studies] == []
