"""Slips in model.py, which people edit: each shows its file and line, whatever the type of its error."""

import sys

import pytest

from conftest import TINY

TRAIN = f"train.py {TINY}"
# what stands in model.py, what somebody makes of it, and a program that comes upon it
SLIPS = {
    "a wrong unpacking": ("x = self.embed(idx)", "B, T = self.embed(idx).shape", TRAIN),
    "shapes that differ in the loss": ("targets.flatten().long()", "targets[:, 1:].flatten().long()", TRAIN),
    "an import of what is not here": ("import torch.nn as nn", "import torch.nn as nn, flash_attention", TRAIN),
    "a file that is not here": ("x = self.embed(idx)", "x = torch.load('table.pt')", TRAIN),
    "in building what a checkpoint has": ("self.init_weights()", "_, = self.init_weights(), None", "sample.py"),
    "in generating": ("x = self.embed(idx)", "x = self.embed(idx + 1000)", "sample.py"),
}


def take_our_modules():
    """Remove what has been imported of this repository, and nothing of PyTorch's, which cannot be imported twice."""
    names = [name for name in sys.modules if name.split(".")[0] in ("model", "config", "data")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_shows_its_line(repo, monkeypatch, capsys, slip):
    stands, put, program = SLIPS[slip]
    if program == "sample.py":
        repo(TRAIN)
    path = repo.folder / "model.py"
    lines = path.read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if stands in line)
    lines[number] = lines[number].replace(stands, put)
    path.write_text("".join(lines))
    monkeypatch.syspath_prepend(repo.folder)
    ours = take_our_modules()  # the programs import those of this folder
    with pytest.raises(SystemExit) as end:
        repo(program)
    take_our_modules()
    sys.modules.update(ours)
    error = capsys.readouterr().err
    assert end.value.code == 1
    assert error.startswith("Traceback") and f'{path}", line {number + 1}, in' in error, error
