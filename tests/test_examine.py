"""What a variant's step costs, and its loss: that of a model which cannot see the future."""

import copy
import json
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model
from conftest import ROOT, TINY
from model import GPT, GPTConfig

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import examine
import operations
from examine import Refused

T, VOCABULARY = 48, 19
RANDOM = torch.Generator().manual_seed(0)
TOKENS = torch.randint(VOCABULARY - 1, (100, T + 1), generator=RANDOM)  # the last one is spare
WINDOWS = {"x": TOKENS[:, :-1].int(), "y": TOKENS[:, 1:].int()}


def config(**options):
    return GPTConfig(**{"block_size": T, "vocab_size": VOCABULARY, "n_layer": 1, "n_head": 2, "n_embd": 16} | options)


def hold(kind, windows=WINDOWS, **options):
    """Raise Refused as after training. Two models stand for two processes."""
    torch.manual_seed(0)
    one = kind(config(**options)).eval()
    other = copy.deepcopy(one)
    prefixes, _ = examine.read_prefixes(one, windows, examine.PAIRS)
    examine.check_future(other, windows, examine.read_windows(other, windows, 8), prefixes)


def with_logits(change):
    """Return a model whose logits are changed by change(model, logits, idx, targets), with a gate and a mask."""

    class Mine(GPT):
        def __init__(self, config):
            super().__init__(config)
            self.gate = torch.nn.Parameter(torch.zeros(1))
            self.past = torch.nn.Parameter(torch.ones(T, T).tril(), requires_grad=False)

        def forward(self, idx, targets=None):
            logits = change(self, super().forward(idx)[0], idx, targets)
            return logits, None if targets is None else self.loss(logits, targets)

    return Mine


def later(idx, distance=1):
    """Return the tokens `distance` later, one-hot, zeros at the end."""
    ahead = F.one_hot(idx.long(), VOCABULARY)[:, distance:].float()
    return F.pad(ahead, (0, 0, 0, min(distance, idx.size(1))))


def spare(value):
    """Mask the row of the vocabulary that is no token."""
    return lambda m, logits, idx, y: logits.masked_fill(torch.arange(VOCABULARY) == VOCABULARY - 1, value)


def but_every_fourth(m, logits, idx, y):
    return logits + later(idx) * (torch.arange(idx.size(1)) % 4 > 0)[:, None]


def from_call_to_call(m, logits, idx, y):
    """It knows the last batch, as a cache that nobody empties would."""
    seen = getattr(m, "seen", idx[:, :1])
    m.seen = idx
    return logits + F.one_hot(seen.long(), VOCABULARY).float().mean(dim=(0, 1))


MASKS = {f"a mask of {value:g}": spare(value) for value in (-1e10, torch.finfo(torch.float32).min, -torch.inf)}
LEAKS = {
    "the next token": lambda m, logits, idx, y: logits + later(idx),
    "one far away": lambda m, logits, idx, y: logits + later(idx, 40),
    "at all places but every fourth": but_every_fourth,
    "only in batches": lambda m, logits, idx, y: logits + later(idx) if len(idx) > 1 else logits,
    "of the next row": lambda m, logits, idx, y: logits + later(idx.roll(1, 0)),
    "from call to call": from_call_to_call,
    "only if told targets": lambda m, logits, idx, y: logits if y is None else logits + later(idx),
    "only in full windows": lambda m, logits, idx, y: logits + later(idx) * (idx.size(1) == T),
}
for name, mask in MASKS.items():
    LEAKS[f"behind {name}"] = lambda m, logits, idx, y, mask=mask: mask(m, logits + 0.01 * later(idx), idx, y)


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_refused(name):
    with pytest.raises(Refused, match="sees the future|depends on the length|keeps state"):
        hold(with_logits(LEAKS[name]))


def cumulative_mean(m, logits, idx, y):
    return logits + logits.cumsum(1) / torch.arange(1, idx.size(1) + 1)[:, None]


def convolution_by_fft(m, logits, idx, y):
    size = 2 * idx.size(1)
    kernel = torch.fft.rfft(0.5 ** torch.arange(idx.size(1)).float(), n=size)[:, None]
    return torch.fft.irfft(torch.fft.rfft(logits, n=size, dim=1) * kernel, n=size, dim=1)[:, : idx.size(1)]


HONEST = MASKS | {
    "a cumulative mean": cumulative_mean,
    "a long convolution": convolution_by_fft,
    "16 bits inside": lambda m, logits, idx, y: (logits + 8).bfloat16(),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_is_honest_passes(name):
    hold(with_logits(HONEST[name]))


@pytest.mark.parametrize("change, why", [
    (lambda m, logits, idx, y: logits * idx.size(1), "it depends on the length of the context"),
    (lambda m, logits, idx, y: logits + torch.tensor([*os.urandom(VOCABULARY)]), "it is random or keeps state"),
    (lambda m, logits, idx, y: logits * torch.nan, "its loss is not finite: log p of a target is nan"),
    (lambda m, logits, idx, y: logits.masked_fill(torch.arange(VOCABULARY) == 3, -torch.inf), "is -inf"),
])  # fmt: skip
def test_a_refusal_says_why(change, why):
    with pytest.raises(Refused, match=why):
        hold(with_logits(change))


def test_places_without_a_target_are_not_read():
    windows = WINDOWS | {"y": WINDOWS["y"].clone()}
    windows["y"][:, 2:] = -1
    places = torch.arange(T)[:, None]
    hold(with_logits(lambda m, logits, idx, y: logits + later(idx) * (places[: idx.size(1)] >= 2)), windows)


def test_every_window_is_read_once_at_a_place_that_nobody_can_predict():
    calls = []
    record = with_logits(lambda m, logits, idx, y: calls.append(idx) or logits)(config()).eval()
    (first, seed), (second, other) = (examine.read_prefixes(record, WINDOWS, 1024) for _ in range(2))
    assert sorted(row for row, *_ in first) == list(range(100)) and first != second and seed != other
    assert {len(idx) == 1 for idx in calls} == {True, False}


# -- what a step costs ---------------------------------------------------------------------------------------------


@pytest.fixture
def cost(repo, monkeypatch, tmp_path):
    """Return a function: the operations of a step of train.py with another GPT and other options."""
    for name in ("argv", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(torch.backends.cuda, "enable_flash_sdp", torch.backends.cuda.enable_flash_sdp)
    operations.use_plain_attention()
    folders = (tmp_path / str(number) for number in range(9))

    def cost(kind=GPT, *options):
        monkeypatch.setattr(model, "GPT", kind)
        return operations.train_briefly(ROOT, [*TINY.split(), "--dtype=float32", *options], next(folders))

    return cost


@pytest.mark.parametrize("options", [[], ["--residual=m1"], ["--attention=summed_qk"], ["--dtype=bfloat16"]])
def test_a_step_costs_what_its_tokens_do(cost, tmp_path, options):
    counted = cost(GPT, *options)
    start = json.loads((tmp_path / "0" / "2" / "log.jsonl").read_text().splitlines()[0])
    assert counted == 2 * 16 * start["flops_per_token"]


def test_larger_batches_cost_more(cost):
    assert cost(GPT, "--batch_size=6") == 3 * cost(GPT)


class Shallow(GPT):
    """In training each layer is left out half of the time."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.blocks:
            block.forward = lambda x, *rest, run=block.forward: run(x, *rest) if self.stays() else (x, None)

    def stays(self):
        return not self.training or torch.rand(()) < 0.5


def test_layers_left_out_at_random_cost_what_they_do_on_average(cost):
    deep = "--n_layer=6"
    assert cost(Shallow, deep) / cost(GPT, deep) == pytest.approx(0.5, abs=0.15)


class Fused(GPT):
    def forward(self, idx, targets=None):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return super().forward(idx, targets)


class ClaimsLess(GPT):
    def flops_per_token(self):
        return 1


@pytest.mark.parametrize("kind", [Fused, ClaimsLess])
def test_neither_the_choice_of_a_kernel_nor_a_claim_makes_a_model_cheaper(cost, kind):
    assert cost(kind) == cost(GPT)


def test_an_error_in_training_is_no_operation(cost):
    with pytest.raises(ValueError, match="max_iters|n_head"):
        cost(GPT, "--n_head=3")


x, matrix, vector = torch.ones(4, 40, 8, requires_grad=True), torch.ones(6, 8, requires_grad=True), torch.ones(8)
PASSED_OVER = {  # operations, and the multiplications and additions of their forward and backward passes
    "lstm": (lambda: torch.nn.LSTM(8, 16, 2, batch_first=True)(x)[0], 3 * 2 * 160 * (64 * 8 + 3 * 64 * 16)),
    "bilinear": (lambda: torch.nn.Bilinear(8, 8, 5)(x, x), 4 * 2 * 160 * 5 * 8 * 8),
    "cdist": (lambda: torch.cdist(x, x, p=1.0), 3 * 2 * 4 * 40 * 40 * 8),
    "mv": (lambda: matrix @ vector, 2 * 6 * 8),
    "dot": (lambda: x[0, 0] @ vector, 2 * 8),
}


@pytest.mark.parametrize("name", PASSED_OVER)
def test_what_pytorch_passes_over_is_counted(name):
    function, expected = PASSED_OVER[name]
    with FlopCounterMode(display=False, custom_mapping=operations.FORMULAS) as counter:
        function().sum().backward()
    assert counter.get_total_flops() == expected


# -- before and after training -------------------------------------------------------------------------------------


@pytest.fixture
def look(cost, monkeypatch):
    """Return a function: what is found before a GPT is trained."""
    few = {name: part[:, :16] for name, part in WINDOWS.items()}

    def look(kind):
        monkeypatch.setattr(model, "GPT", kind)
        return examine.look_before(ROOT, few, [*TINY.split(), "--dtype=float32"])

    return look


def test_a_leak_behind_a_gate_that_is_still_closed_is_refused_before_training(look):
    with pytest.raises(Refused, match="it sees the future"):
        look(with_logits(lambda m, logits, idx, y: logits + m.gate * logits.roll(-1, 1)))


def test_frozen_parameters_are_not_disturbed(look):
    look(with_logits(lambda m, logits, idx, y: logits + m.past[: idx.size(1), : idx.size(1)] @ logits))


def test_a_model_whose_operations_cannot_be_counted_is_no_crash(look):
    def uncountable(m, logits, idx, y):
        if torch.utils._python_dispatch._len_torch_dispatch_stack():
            raise RuntimeError("no modes")
        return logits

    verdict, why = look(with_logits(uncountable))["trouble"]
    assert verdict == "undecided" and why == "its operations cannot be counted: RuntimeError: no modes"


def test_the_loss_of_the_weights_is_measured(tmp_path, monkeypatch):
    """On all targets, whatever the model says of its loss."""
    torch.manual_seed(0)
    gpt, windows = GPT(config()), WINDOWS | {"y": WINDOWS["y"].clone()}
    windows["y"][3, 30:] = -1
    saved = {"model": gpt.state_dict(), "config": vars(config()), "iter_num": 4}
    torch.save(saved | {"settings": {"device": "cpu", "batch_size": 8}}, tmp_path / "ckpt.pt")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    facts = examine.look_after(str(ROOT), windows, tmp_path)
    assert facts["step"] == 4
    assert facts["loss"] == pytest.approx(gpt(windows["x"].long(), windows["y"].long())[1].item(), rel=1e-5)
