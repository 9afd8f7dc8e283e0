"""Settings: config/__init__.py and the files beside it."""

import runpy
from pathlib import Path

import pytest

import config
from config import UserError, configure, convert, read_settings

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
    assert read_settings(program, []).values == DEFAULTS
    assert read_settings(program, [first, "--offset=7", second]).given == expected
    assert read_settings(program, [second, first]).given["max_iters"] == 10
    assert read_settings(program, ["--bias"]).given == {"bias": True}
    assert read_settings(program, [second, "--max_iters=2000"]).given == {"max_iters": 2000, "offset": -5}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_settings(program, ["second.py"]).given["max_iters"] == 20  # found next to the program


@pytest.mark.parametrize("value, default, expected", [
    ("9007199254740993", 5, 9007199254740993),
    ("1e3", 5, 1000),
    ("0", 0.5, 0.0),
    ("False", True, False),
    (5.1, "5.1", "5.1"),
    ("~/x", "", "/home/me/x"),
    ("run:~/x", "", "run:/home/me/x"),
    ("FILE:~/x", "", "FILE:/home/me/x"),
])  # fmt: skip
def test_conversions(monkeypatch, value, default, expected):
    monkeypatch.setenv("HOME", "/home/me")
    result = convert("x", value, {"x": default}, "--x")
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize("value, default", [
    *[(value, 5) for value in (1.5, "1.5", True, "", "nan", None)],
    *[(value, 0.5) for value in ("nan", "inf", "1e999", True, "x", None)],
    *[(value, True) for value in ("maybe", "", 2, None)],
    *[(value, "text") for value in (None, ["a"])],
])  # fmt: skip
def test_refused_values(value, default):
    with pytest.raises(UserError, match="--x: expected .*, not") as error:
        convert("x", value, {"x": default}, "--x")
    assert len(str(error.value)) < 150


@pytest.mark.parametrize("argument, config_file, named", [
    ("--max_iters", "", "--max_iters=VALUE"),
    ("max_iters=5", "", "--name=value"),
    ("x.py", "max_iter = 5", "x.py: max_iter: unknown setting (did you mean max_iters?)"),
    ("x.py", "max_iters = 1.5", "x.py: max_iters: expected a whole number"),
    ("x.py", "\nmax_iters = = 5", "x.py: SyntaxError: invalid syntax (x.py, line 2)"),
    ("x.py", "exit(0)", "x.py: SystemExit: 0"),
    ("story.txt", "max_iters = 5", "story.txt: no such config file"),  # a text is not run
])  # fmt: skip
def test_errors_of_the_command_line_and_of_config_files(program, argument, config_file, named):
    Path(argument).write_text(config_file)
    with pytest.raises(UserError) as error:
        read_settings(program, [argument])
    assert named in str(error.value)


def test_help_prints_the_settings_as_they_stand(program, capsys):
    with pytest.raises(SystemExit) as end:
        configure(program, ["--max_iters=5", "--help"])
    block = PROGRAM[PROGRAM.index("# a comment") : PROGRAM.index("import")].strip()
    assert not end.value.code and capsys.readouterr().out == f"A program.\n\n{block}\n"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_shakespeare.py")), ids=lambda path: path.stem)
def test_configs_of_variants_differ_in_the_variant_alone(path):
    """... which their names tell."""
    names = runpy.run_path(str(path))
    given = {name: value for name, value in names.items() if not name.startswith("_")}
    kinds, methods = {"attention", "qk_scale", "sigma"}, {"residual", "keep_input"}  # whose files can be combined
    both = kinds | methods if path.stem == "standard_shakespeare" else set()
    assert names["__doc__"] and any(given.keys() <= settings for settings in (kinds, methods, both))
    name = list(given.values())[-1].replace(".", "_")
    assert path.stem in (f"{name}_shakespeare", f"m{name}_shakespeare")
    needs = {"qk_scale": "summed_qk", "sigma": "w2"}
    assert all(given["attention"] == needs[name] for name in given.keys() & needs.keys())
