"""Before a candidate is trained its model is examined, and after training its weights: leaks, losses, gradients."""

import random
import sys

import pytest
import torch
import torch.nn.functional as F

from conftest import ROOT
from model import ATTENTIONS, GPT, RESIDUALS, GPTConfig

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import examine
from examine import Refused

T, VOCABULARY, NEWLINE = 192, 19, 3


def context_of(dtype="float32", block_size=T, compile="false"):
    """Windows of a text in which a newline comes every ten tokens or so."""
    tokens = torch.randint(VOCABULARY, (12, block_size + 1), generator=torch.Generator().manual_seed(0))
    windows = {"x": tokens[:, :-1].int(), "y": tokens[:, 1:].int(), "vocab_size": VOCABULARY}
    return examine.Context({"device": "cpu", "dtype": dtype, "batch_size": 4, "compile": compile}, windows)


def config(**options):
    shape = {"block_size": T, "vocab_size": VOCABULARY, "n_layer": 1, "n_head": 2, "n_embd": 16}
    return GPTConfig(**shape | options)


@pytest.mark.parametrize(
    "attention, residual", [*((kind, "m3.2") for kind in ATTENTIONS), *(("standard", method) for method in RESIDUALS)]
)
def test_what_is_built_in_passes(attention, residual):
    options = {"attention": attention, "residual": residual, "n_layer": 2, "block_size": 32, "dropout": 0.1}
    facts = examine.look_before(GPT, config(**options), context_of(block_size=32))
    assert facts["parameters"] > 0 and facts["flops_per_token"] > 0


def with_logits(change):
    """Return a model whose logits are changed by change(model, logits, idx, targets), and its loss with them."""

    class Mine(GPT):
        def forward(self, idx, targets=None):
            logits = change(self, super().forward(idx)[0], idx, targets)
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    return Mine


def one_hot(idx):
    return F.one_hot(idx, VOCABULARY).float()


def later(idx, distance):
    """Return the tokens `distance` later, one-hot, zeros at the end."""
    return F.pad(one_hot(idx)[:, distance:], (0, 0, 0, min(distance, idx.size(1))))


def distance_to_newline(model, logits, idx, targets):
    T = idx.size(1)
    places = torch.where(idx == NEWLINE, torch.arange(T), 2 * T).flip(1).cummin(dim=1).values.flip(1)
    return logits + 0.1 * (places - torch.arange(T))[..., None].clamp(max=20)


def through_a_buffer(model, logits, idx, targets):
    model.memory = later(idx, 1)  # as register_buffer would hold it
    return logits + model.memory


def batch_statistics(model, logits, idx, targets):
    return logits - logits.mean(dim=1, keepdim=True) if model.training else logits


def at_boundaries(model, logits, idx, targets):
    """As blocks of 16 would whose first token belongs to the block before."""
    return logits + later(idx, 1) * (torch.arange(idx.size(1)) % 16 == 15)[:, None]


def in_large_batches(model, logits, idx, targets):
    return logits + later(idx, 1) if len(idx) > 3 else logits


def the_next_row(model, logits, idx, targets):
    return logits + F.pad(one_hot(idx)[1:], (0, 0, 0, 0, 0, 1))


LEAKS = {
    "the next token": (lambda m, logits, idx, y: logits + later(idx, 1), "sees the future in evaluation"),
    "beyond 128 tokens": (lambda m, logits, idx, y: logits + later(idx, 150), "sees the future in evaluation"),
    "distance to the newline": (distance_to_newline, "sees the future"),
    "targets": (lambda m, logits, idx, y: logits if y is None else logits + one_hot(y.clamp(min=0)), "sees the future"),
    "a buffer": (through_a_buffer, "sees the future"),
    "in training": (batch_statistics, "sees the future in training"),
    "other rows": (lambda m, logits, idx, y: logits + one_hot(idx).cumsum(1).mean(0), "sees other sequences"),
    "block boundaries": (at_boundaries, "position 15 change with tokens from 16 on"),
    "large batches": (in_large_batches, "sees the future"),
    "the next row": (the_next_row, "sees other sequences"),
    "small": (lambda m, logits, idx, y: logits + 1e-6 * later(idx, 1), "sees the future"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_refused(name):
    change, named = LEAKS[name]
    with pytest.raises(Refused, match=named):
        examine.look_before(with_logits(change), config(), context_of())


def test_a_leak_shows_in_a_single_window():
    context = context_of()
    context.x, context.y = context.x[:1], context.y[:1]
    with pytest.raises(Refused, match="sees the future"):
        examine.look_before(with_logits(LEAKS["the next token"][0]), config(), context)


def only_in_bfloat16(model, logits, idx, targets):
    return logits + later(idx, 1) if torch.is_autocast_enabled("cpu") else logits


def only_with_dropout(model, logits, idx, targets):
    return logits + later(idx, 1) if model.training and model.config.dropout else logits


@pytest.mark.parametrize("change, dtype, dropout", [
    (only_in_bfloat16, "bfloat16", 0),
    (only_with_dropout, "float32", 0.1),
])  # fmt: skip
def test_a_leak_in_the_runs_own_type_and_dropout_is_refused(change, dtype, dropout):
    with pytest.raises(Refused, match="sees the future"):
        examine.look_before(with_logits(change), config(dropout=dropout), context_of(dtype))


def test_a_leak_when_compiled_is_refused(monkeypatch):
    """Only a run that is compiled is examined so."""

    class Mine(GPT):
        def compile_blocks(self):
            super().compile_blocks()
            self.compiled = True

        def forward(self, idx, targets=None):
            logits, loss = super().forward(idx, targets)
            return (logits + later(idx, 1) if hasattr(self, "compiled") else logits), loss

    monkeypatch.setattr(torch, "compile", lambda function: function)
    examine.look_before(GPT, config(), context_of(compile="true"))
    examine.look_before(Mine, config(), context_of())
    with pytest.raises(Refused, match="sees the future in evaluation when compiled"):
        examine.look_before(Mine, config(), context_of(compile="true"))


def layer_drop(model, logits, idx, targets):
    return logits if not model.training or torch.rand(()) < 0.5 else logits * 0.9


def layer_drop_by_python(model, logits, idx, targets):
    return logits if not model.training or random.random() < 0.5 else logits * 0.9


def noise_in_training(model, logits, idx, targets):
    return logits + torch.randn_like(logits) * random.random() if model.training else logits


def running_mean(model, logits, idx, targets):
    """As a BatchNorm over time would: in evaluation what was seen in training, in training it moves."""
    mean = getattr(model, "mean", torch.zeros(VOCABULARY))
    if model.training:
        model.mean = mean = 0.9 * mean + 0.1 * logits.detach().mean(dim=(0, 1))
    return logits - mean


def convolution_by_fft(model, logits, idx, targets):
    kernel, size = 0.5 ** torch.arange(idx.size(1)).to(logits.dtype), 2 * idx.size(1)
    wide = torch.fft.rfft(logits, n=size, dim=1) * torch.fft.rfft(kernel, n=size)[:, None]
    return torch.fft.irfft(wide, n=size, dim=1)[:, : idx.size(1)]


def later_switch(model, logits, idx, targets):
    model.calls = getattr(model, "calls", 0) + model.training
    return logits if model.calls < 10 else 2 * logits


HONEST = [later_switch, layer_drop, layer_drop_by_python, noise_in_training, running_mean, convolution_by_fft]


@pytest.mark.parametrize("change", HONEST)
def test_an_honest_method_is_not_accused(change):
    random.seed(0)
    examine.look_before(with_logits(change), config(), context_of())


def test_random_numbers_in_evaluation_are_refused():
    change = lambda model, logits, idx, targets: logits + random.random()
    with pytest.raises(Refused, match="repeated evaluations differ"):
        examine.look_before(with_logits(change), config(), context_of())


def with_loss(loss):
    """Return a model with another loss of its logits, loss(logits, targets)."""

    class Mine(GPT):
        def forward(self, idx, targets=None):
            logits = super().forward(idx)[0]
            return logits, None if targets is None else loss(logits.flatten(0, 1), targets.flatten())

    return Mine


def over_ignored(logits, targets):
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum") / len(targets)


def without_the_hardest(logits, targets):
    losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")[targets >= 0]
    return losses.sort().values[: int(0.9 * len(losses))].mean()


def half(logits, targets):
    return F.cross_entropy(logits, targets, ignore_index=-1) / 2


@pytest.mark.parametrize("loss", [over_ignored, without_the_hardest, half])
def test_a_loss_that_is_not_the_cross_entropy_is_refused(loss):
    with pytest.raises(Refused, match="is not comparable with others"):
        examine.look_before(with_loss(loss), config(), context_of())


def with_gate(use):
    class Mine(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.gate = torch.nn.Parameter(torch.ones(1))

        def forward(self, idx, targets=None):
            logits, loss = super().forward(idx, targets)
            return logits, loss if loss is None else loss + use(self.gate)

    return Mine


@pytest.mark.parametrize("use, named", [
    (lambda gate: 0.0, "its parameter gate gets no gradient"),
    (lambda gate: (gate - gate).abs().sqrt().sum(), "the gradient of its parameter gate is not finite"),
])  # fmt: skip
def test_a_part_that_never_learns_is_refused(use, named):
    with pytest.raises(Refused, match=named):
        examine.look_before(with_gate(use), config(), context_of())


def test_a_part_that_is_left_out_at_random_learns():
    examine.look_before(with_gate(lambda gate: 0 * gate.sum() if torch.rand(()) > 0.6 else 0.0), config(), context_of())


class Unusual(GPT):
    """It has a frozen mask, a frozen number, a parameter that must stay below 1, and three outputs."""

    def __init__(self, config):
        super().__init__(config)
        self.mask = torch.nn.Parameter(torch.ones(T, T).tril(), requires_grad=False)
        self.number = torch.nn.Parameter(torch.tensor(3), requires_grad=False)
        self.decay = torch.nn.Parameter(torch.full((1000,), 0.95))

    def forward(self, idx, targets=None):
        logits = super().forward(idx)[0] + self.mask @ one_hot(idx) / T + (1 - self.decay**2).sqrt().mean()
        loss = None if targets is None else F.cross_entropy(logits.mT, targets, ignore_index=-1)
        return logits, loss, self.number


def test_an_unusual_model_passes():
    examine.look_before(Unusual, config(), context_of())


class WorksInTraining(GPT):
    """A head for the token after the next, as it is used in training only."""

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return logits, loss + 0 * self.head(self.features(idx)).sum() if self.training and targets is not None else loss


def test_operations_of_training_are_counted():
    honest, more = (examine.look_before(kind, config(), context_of()) for kind in (GPT, WorksInTraining))
    assert more["flops_per_token"] == 2 * honest["flops_per_token"]


class ClaimsLess(GPT):
    """It says that it computes less than it does, and does hidden work."""

    def flops_per_token(self):
        return 1

    def forward(self, idx, targets=None):
        super().forward(idx)
        return super().forward(idx, targets)


def test_operations_are_counted_whatever_a_model_says():
    honest, claims = (examine.look_before(kind, config(), context_of()) for kind in (GPT, ClaimsLess))
    assert claims["flops_per_token"] == 2 * honest["flops_per_token"]


def test_the_loss_of_the_weights_is_measured():
    """On all windows, without targets of -1, whatever the model says of its loss."""
    context, model = context_of(), with_loss(lambda *_: torch.zeros(()))(config()).eval()
    context.y[3, 100:] = -1
    logits = GPT.forward(model, context.x.long())[0]
    expected = F.cross_entropy(logits.flatten(0, 1), context.y.long().flatten(), ignore_index=-1)
    assert examine.measure(model, context) == pytest.approx(expected.item(), rel=1e-5)


def test_trained_weights_are_held_to_causality():
    """A leak that only grows in training is found in its weights."""

    class Mine(with_gate(lambda gate: 0 * gate.sum())):
        def forward(self, idx, targets=None):
            logits, loss = super().forward(idx, targets)
            return logits + (self.gate > 5) * later(idx, 1), loss

    saved = {"model": Mine(config()).state_dict(), "iter_num": 4}
    assert examine.look_after(Mine, config(), saved, context_of())["step"] == 4
    saved["model"]["gate"] = torch.tensor([6.0])
    with pytest.raises(Refused, match="sees the future"):
        examine.look_after(Mine, config(), saved, context_of())
