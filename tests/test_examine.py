"""Before a candidate is trained it is examined, and its runs are known by what it computes."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from conftest import ROOT, copy_repository
from model import ATTENTIONS, GPT, RESIDUALS, Attention

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import examine
import runs

SETTINGS = runs.DEFAULTS | {"n_layer": 2}


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_what_is_built_in_passes(attention, residual):
    examine.examine("mine", SETTINGS | {"attention": attention, "residual": residual, "n_kv_head": 2}, vocab_size=19)


class LooksAhead(Attention):
    """As a researcher might: the scores get the next token's key, which is not in their own token."""

    def score_vectors(self, x, rope, earlier):
        q_hat, k_hat, _ = super().score_vectors(x, rope, earlier)
        return q_hat, k_hat + k_hat.roll(-1, dims=2), None


class LooksAheadInTraining(Attention):
    def values(self, x, earlier):
        return super().values(x - x.mean(dim=1, keepdim=True) if self.training else x, earlier)


class WithoutGradient(Attention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.gate = torch.nn.Parameter(torch.ones(1))


class NotFinite(WithoutGradient):
    def forward(self, *arguments):
        return super().forward(*arguments) + (self.gate - self.gate).abs().sqrt()


class Twice(Attention):
    """It runs its last product twice, and counts it once."""

    def output(self, y, x):
        return self.o_proj(self.o_proj(y))


@pytest.mark.parametrize("kind, named", [
    (LooksAhead, "mine sees the future: at position 1 its logits change with token 2"),
    (LooksAheadInTraining, "mine sees the future: at position 0"),
    (WithoutGradient, r"its parameter blocks.0.attn.gate gets no gradient"),
    (NotFinite, r"the gradient of its parameter blocks\.\d\.\S+ is not finite"),
    (Twice, "its cost would be wrong by a factor of 1.041"),
])  # fmt: skip
def test_what_is_wrong_is_named(monkeypatch, kind, named):
    monkeypatch.setitem(ATTENTIONS, "standard", kind)
    with pytest.raises(ValueError, match=named):
        examine.examine("mine", SETTINGS, vocab_size=19)


def test_a_loss_of_ones_own_does_not_compare(monkeypatch):
    loss = GPT.loss
    monkeypatch.setattr(GPT, "loss", lambda model, logits, targets: loss(model, logits, targets) / 2)
    with pytest.raises(ValueError, match="is not comparable with others"):
        examine.examine("mine", SETTINGS, vocab_size=19)


CHANGES = {  # a file, what is changed in it, and whether the candidate then computes something else
    "nothing": ("model.py", "", "", False),
    "a comment and a class": ("model.py", "class KVCache:", "class Mine:  # mine\n    pass\n\n\nclass KVCache:", False),
    "initial size": ("model.py", "(2 * self.config.n_layer) ** -0.5", "self.config.n_layer ** -0.5", True),
    "batch order": ("train.py", "data.batch(seed, iter_num,", "data.batch(seed, iter_num + 1,", True),
    "decay": ("train.py", "1 + math.cos(math.pi * done)", "1 + math.cos(3 * done)", True),
}  # fmt: skip


def test_a_fingerprint_is_that_of_what_is_computed(tmp_path, monkeypatch):
    candidate = runs.make_candidate("mine", SETTINGS | {"compile": "true", "dtype": "bfloat16"}, vocab_size=19)

    def mark(name):
        file, old, new, _ = CHANGES[name]
        (tmp_path / name).mkdir()
        folder = copy_repository(tmp_path / name)
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new) if old else text)
        return examine.fingerprint(candidate, folder / "train.py")

    with ThreadPoolExecutor(2) as pool:
        marks = dict(zip(CHANGES, pool.map(mark, CHANGES)))
    assert {name: value != marks["nothing"] for name, value in marks.items()} == {
        name: change[3] for name, change in CHANGES.items()
    }


def test_train_py_that_fails_is_told_with_its_traceback(tmp_path, capsys):
    (tmp_path / "train.py").write_text("raise TypeError('mine')")
    candidate = runs.make_candidate("mine", SETTINGS, vocab_size=19)
    with pytest.raises(ValueError, match="mine: train.py cannot finish .*: TypeError: mine"):
        examine.fingerprint(candidate, tmp_path / "train.py")
    assert "Traceback" in capsys.readouterr().err
