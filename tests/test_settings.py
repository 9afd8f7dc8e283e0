"""Settings: config/__init__.py and the files beside it."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import config
from config import convert, read_settings
from config.runtime import checkpoints
from config.runtime.program import UserError, report_error
from config.runtime.runs import METHOD, ineffective_settings, replaced_settings
from conftest import TINY, refused

CONFIGS = Path(config.__file__).parent
PROGRAM = '''"""A program."""

# a comment of its own
dataset = "words"  # folder below data/
compile = "auto"   # auto, true or false
max_iters = 2000
offset = -1        # negative numbers are literals, too
dropout = 0.1      # share dropped
bias = False       # biases

import config
later = 5
'''
DEFAULTS = {"dataset": "words", "compile": "auto", "max_iters": 2000, "offset": -1, "dropout": 0.1, "bias": False}


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["program.py"])
    Path("program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_files_in_order_then_options(program, tmp_path, monkeypatch):
    first, second = "first.py", "second.py"
    Path(first).write_text('"""A file."""\nimport math\nfrom math import sqrt\ndropout = 0\nmax_iters = 10\n_x = 1')
    Path(second).write_text("max_iters = 20\noffset = -5\ndef helper(): pass")
    expected = {"dropout": 0.0, "max_iters": 20, "offset": 7}
    assert read_settings(program, [first, "--offset=7", second])[0] == DEFAULTS
    assert read_settings(program, [first, "--offset=7", second]).given == expected
    assert read_settings(program, [second, first]).given["max_iters"] == 10
    assert read_settings(program, ["--bias"]).given == {"bias": True}
    assert read_settings(program, [second, "--max_iters=2000"]).given == {"max_iters": 2000, "offset": -5}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_settings(program, ["second.py"]).given["max_iters"] == 20  # found next to the program
    program.write_text("\ufeff" + PROGRAM, encoding="utf-8")  # the byte-order mark of some editors
    assert read_settings(program, []).defaults == DEFAULTS


@pytest.mark.parametrize("value, default, expected", [
    ("9007199254740993", 5, 9007199254740993),
    ("1e3", 5, 1000),
    ("0", 0.5, 0.0),
    ("False", True, False),
    (False, "auto", "false"),
    (5.1, "5.1", "5.1"),
])  # fmt: skip
def test_conversions(value, default, expected):
    result = convert("x", value, {"x": default}, "--x")
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize("name, value, expected", [
    ("out_dir", "~/x", "/home/me/x"),
    ("init_from", "run:~/x", "run:/home/me/x"),
    ("start", "FILE:~/x", "FILE:/home/me/x"),
    ("start", "~/x", "~/x"),  # a text
])  # fmt: skip
def test_paths_begin_at_home(monkeypatch, name, value, expected):
    monkeypatch.setenv("HOME", "/home/me")
    assert convert(name, value, {name: ""}, "--") == expected


@pytest.mark.parametrize("line", ["ema: float = 0.0", "steps = 5 * 8", "betas = (0.9, 0.95)"])
def test_a_setting_that_is_no_plain_assignment_is_named(tmp_path, line):
    program = tmp_path / "program.py"
    program.write_text(f'"""A program."""\n\nseed = 1\n{line}\n\nimport math\n')
    with pytest.raises(UserError, match="program.py, line 4: a setting is name = value"):
        read_settings(program, [])


@pytest.mark.parametrize("value, default", [
    *[(value, 5) for value in (1.5, "1.5", True, "", "nan", "9" * 200, None)],
    *[(value, 0.5) for value in ("nan", "inf", "1e999", True, "x", None)],
    *[(value, True) for value in ("maybe", "", 2, None)],
    *[(value, "text") for value in (None, ["a"])],
])  # fmt: skip
def test_refused_values(value, default):
    with pytest.raises(UserError, match="--x: expected .*, not") as error:
        convert("x", value, {"x": default}, "--x")
    assert len(str(error.value)) < 150


@pytest.mark.parametrize("argument, config_file, named", [
    ("--max_iters", "", "--max_iters=value"),
    ("max_iters=5", "", "--name=value"),
    ("x.py", "max_iter = 5", "x.py: max_iter: unknown setting (did you mean max_iters?)"),
    ("x.py", "max_iters = 1.5", "x.py: max_iters: expected a whole number"),
    ("x.py", "\nmax_iters = = 5", "x.py: SyntaxError: invalid syntax (x.py, line 2)"),
    ("x.py", "exit(0)", "x.py: SystemExit: 0"),
])  # fmt: skip
def test_errors_of_the_command_line_and_of_config_files(program, argument, config_file, named):
    Path("x.py").write_text(config_file)
    with pytest.raises(UserError) as error:
        read_settings(program, [argument])
    assert named in str(error.value)


def test_help_prints_the_settings_as_they_stand(program, capsys):
    with pytest.raises(SystemExit) as end:
        read_settings(program, ["--max_iters=5", "--help"])
    block = PROGRAM[PROGRAM.index("# a comment") : PROGRAM.index("import")].strip()
    assert end.value.code == 0 and capsys.readouterr().out == f"A program.\n\n{block}\n"


@pytest.mark.parametrize("program", ["train.py", "sample.py"])
def test_help_needs_no_pytorch(repo, program):
    Path("torch.py").write_text("raise SystemExit('PyTorch was imported')")
    shown = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, check=True)
    assert "seed = 1337" in shown.stdout


def test_an_error_is_one_line(capsys):
    with pytest.raises(SystemExit):
        report_error(UserError, UserError("two\nlines"), None)
    assert capsys.readouterr().err.endswith(": error: two lines\n")


def gpu_without_memory(n):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


@pytest.mark.parametrize("allocate", [torch.empty, np.empty, gpu_without_memory])
def test_too_little_memory_ends_in_one_line(monkeypatch, capsys, allocate):
    monkeypatch.setattr("sys.argv", ["some/sample.py"])
    with pytest.raises((RuntimeError, MemoryError)) as error:
        allocate(2**58)
    with pytest.raises(SystemExit) as end:
        report_error(error.type, error.value, None)
    assert end.value.code == 2
    line = "sample.py: error: out of memory: use a smaller batch_size, block_size, num_samples or model\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("allocate", [torch.empty, np.empty])
def test_a_checkpoint_too_large_for_memory_is_not_called_damaged(monkeypatch, tmp_path, allocate):
    (tmp_path / "best.pt").touch()
    monkeypatch.setattr(torch, "load", lambda *_, **__: allocate(2**58))
    with pytest.raises((RuntimeError, MemoryError), match="allocate"):
        checkpoints.load(tmp_path / "best.pt")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_shakespeare.py")), ids=lambda path: path.stem)
def test_configs_of_variants_differ_in_the_variant_alone(path):
    """... which their names tell."""
    names = runpy.run_path(str(path))
    given = {name: value for name, value in names.items() if not name.startswith("_")}
    assert names["__doc__"] and given.keys() <= set(METHOD)
    assert list(given.values())[-1].replace(".", "_") in path.stem or given == {"attention": "w2", "sigma": "none"}
    needs = {"qk_scale": "summed_qk", "sigma": "w2", "w2_score": "w2"}
    assert all(given["attention"] == needs[name] for name in given.keys() & needs.keys())


@pytest.mark.parametrize("name", config.WORDS)
def test_nanogpts_words_are_translated(name):
    meant = config.WORDS[name].partition(",")[0]
    assert meant in read_settings(CONFIGS.parent / "train.py", []).defaults
    with pytest.raises(UserError, match=f"--{name}: unknown setting .train.py calls it {meant}"):
        read_settings(CONFIGS.parent / "train.py", [f"--{name}=1"])


@pytest.mark.parametrize("name, hint", [
    ("top-K", "did you mean top_k?"),
    ("num_sample", "did you mean num_samples?"),
    ("top_p", "--help lists all settings"),  # top_k would be another setting
])  # fmt: skip
def test_the_setting_that_was_meant_is_suggested(name, hint):
    with pytest.raises(UserError) as error:
        read_settings(CONFIGS.parent / "sample.py", [f"--{name}=1"])
    assert str(error.value) == f"--{name}: unknown setting ({hint})"


@pytest.mark.parametrize("path, names", [
    ("m1", "m1_shakespeare.py"),
    ("config/m3.py", "m3_1_shakespeare.py or config/m3_2_shakespeare.py"),
    ("config/m1_shakespere.py", "m1_shakespeare.py"),
])  # fmt: skip
def test_a_config_file_is_suggested(path, names):
    with pytest.raises(UserError) as error:
        read_settings(CONFIGS.parent / "train.py", [path])
    assert str(error.value) == f"{path}: no such config file (did you mean config/{names}?)"


def test_a_text_is_not_run_as_a_config(program):
    Path("story.txt").write_text("import os; os.mkdir('executed')")
    with pytest.raises(UserError, match="config files end in .py; data/text/prepare.py reads texts"):
        read_settings(program, ["story.txt"])
    assert not Path("executed").exists()


@pytest.mark.parametrize("name, value, idle, at_work", [
    ("qk_scale", "5.2", "attention=w2", {"attention": "summed_qk"}),
    ("sigma", "none", "w2_score=overlap", {"attention": "w2"}),
    ("residual", "m1", "n_layer=1", {}),
    ("keep_input", True, "residual=standard", {"residual": "m1"}),
])  # fmt: skip
def test_an_option_without_effect_is_noted(name, value, idle, at_work):
    settings = read_settings(CONFIGS.parent / "train.py", []).values | at_work | {name: value}
    assert ineffective_settings(settings, {name: value}) == []
    other, what = idle.split("=")
    lines = ineffective_settings(settings | {other: type(settings[other])(what)}, {name: value})
    assert lines == [f"{name} = {value!r} has no effect with {idle}"]


def test_a_config_file_that_replaces_a_value_of_another_is_noted():
    files = [CONFIGS / f"{name}_shakespeare.py" for name in ("w2", "m3_2", "m5_2", "m4_1", "m4_1")]
    lines = replaced_settings(read_settings(CONFIGS.parent / "train.py", [*map(str, files), "--residual=m1"]).files)
    assert lines == [
        f"attention = 'summed_qk' of {files[2]} replaces 'w2' of {files[0]}",
        f"residual = 'm4.1' of {files[3]} replaces 'm3.2' of {files[1]}",
    ]


@pytest.mark.parametrize("environment, words", [
    ("WORLD_SIZE=2", "WORLD_SIZE = '2', but no RANK"),
    ("WORLD_SIZE=2 RANK=1", "WORLD_SIZE = '2', but no LOCAL_RANK"),
    ("WORLD_SIZE=two RANK=0 LOCAL_RANK=0", "WORLD_SIZE = 'two'"),
    ("WORLD_SIZE=0 RANK=0 LOCAL_RANK=0", "WORLD_SIZE = '0'"),
    ("WORLD_SIZE=2 RANK=x LOCAL_RANK=0", "WORLD_SIZE = '2', RANK = 'x'"),
    ("WORLD_SIZE=2 RANK=5 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=1", "WORLD_SIZE = '2', RANK = '5'"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=0", "WORLD_SIZE = '2', but no MASTER_ADDR"),
    ("RANK=0", None),
    ("WORLD_SIZE=1 LOCAL_RANK=1", None),
])  # fmt: skip
def test_a_part_of_what_torchrun_sets_is_named(repo, capsys, monkeypatch, environment, words):
    for variable in environment.split():
        monkeypatch.setenv(*variable.split("="))
    if words:
        error = refused(repo, "train.py", capsys)
        assert f"the environment has {words}" in error and "start several processes with torchrun" in error
    else:
        assert "steps   0 to 4" in repo(f"train.py {TINY}")
