"""What the documents show must work."""

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from config import read_defaults, read_settings
from conftest import ROOT, TINY, log_of, shrink

BENCH = ROOT / "tests" / "bench"
PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in ("config", "data"))]
PAGES += (ROOT / "tests").glob("**/*.md")
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
OF_RUNS = TEXTS["config/README.md"]
OUR_PROGRAM = re.compile(r"^ {4}(?:\w+=\S+ )?(?:python|torchrun --\S+ --\S+) ((?:\w+/)*\w+\.py.*)", re.MULTILINE)
COMMANDS = [(page, found) for page, text in TEXTS.items() for found in OUR_PROGRAM.findall(text) if "..." not in found]


def test_the_columns_of_the_log_are_all_there(repo):
    repo(f"train.py {TINY} --out_dir=run")
    repo("train.py --init_from=resume --out_dir=run --max_iters=5")
    columns = {name for line in log_of("run") for name in (line["event"], *line)}
    assert [name for name in columns if f"`{name}`" not in OF_RUNS] == []


def test_a_run_is_shared_as_model_and_checkpoint(repo, tmp_path, monkeypatch):
    repo(f"train.py {TINY} --attention=w2 --residual=m1 --out_dir=out/run")
    for name in ("model.py", "out/run/best.pt"):
        shutil.copy(name, tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PYTHONUTF8", "1")
    command = [sys.executable, "-c", re.search(r"```python\n(.*?)```", OF_RUNS, re.DOTALL)[1]]
    text = subprocess.check_output(command, cwd=tmp_path, text=True)
    assert text.startswith("the") and len(text) > 100


def anchors(page):
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_links_exist(page):
    for name in re.findall(r"(?:config|data|tests)/\w+(?:/\w+)?\.(?:py|txt)\b", TEXTS[page]):
        made_by_the_reader = "NAME" in name or name.endswith("/input.txt")
        assert made_by_the_reader or (ROOT / name).exists(), name
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", TEXTS[page]):
        if not link.startswith("https://"):
            target = (ROOT / page).parent / link if link else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("page, command", COMMANDS)
def test_commands_parse(page, command):
    """Every setting in them exists, and so does every config file."""
    program, *arguments = shlex.split(command, comments=True)
    assert (ROOT / program).is_file()
    files = [argument for argument in arguments if not argument.startswith("-")]
    if program.endswith(("compare.py", "speed.py")):
        own, _ = read_defaults(BENCH / "compare.py")
        common = [word for word in arguments if word[:2] == "--" and word[2:].partition("=")[0] not in own]
        for one in (word for word in arguments if not word.startswith("--")):
            importlib.import_module("compare").read_variant(one, common, ROOT)
    elif "config import" in (ROOT / program).read_text(encoding="utf-8"):
        of_another_kind = files if program != "train.py" else []  # texts, tasks
        read_settings(ROOT / program, [argument for argument in arguments if argument not in of_another_kind])


def test_the_commands_of_the_first_page_work(repo):
    for name in ("my.txt", "new.txt"):
        shutil.copy("data/shakespeare_char/input.txt", name)
    shrink("train.py", "config/size_gpu.py")
    for page, command in COMMANDS:
        program, *arguments = shlex.split(command.replace("=1600", "=6"), comments=True)
        if page == "README.md" and "compare.py" not in program:
            assert "new weights" not in repo([program, *arguments])
    made = ["plays", "new-from=plays-learning_rate=0.0003", "m1_shakespeare"]
    for run in [*made, "m1_shakespeare-size_gpu-gradient_accumulation_steps=2"]:
        assert Path(f"out/{run}/ckpt.pt").exists()
