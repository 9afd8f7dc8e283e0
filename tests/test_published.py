"""A published Llama, in the folder LLAMA_DIR: read, started from, written. `.ci/run newest` makes such a folder."""

import os
from pathlib import Path

import pytest
import torch

if not os.environ.get("LLAMA_DIR"):
    pytest.skip("LLAMA_DIR names no folder of a published Llama", allow_module_level=True)
FOLDER = str(Path(os.environ["LLAMA_DIR"]).resolve())

from transformers import AutoModelForCausalLM, AutoTokenizer

from data.huggingface import from_pretrained
from data.tokenizer import hf_tokenizer

TEXT = """Before we proceed any further, hear me speak. You are all resolved rather to die than to famish? First, you
know Caius Marcius is chief enemy to the people. Let us kill him, and we'll have corn at our own price."""


@pytest.fixture(scope="module")
def theirs():
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def ours():
    return from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def idx():
    """Return the tokens of TEXT, (1, T)."""
    tokens = hf_tokenizer(FOLDER).encode(TEXT)
    assert tokens == AutoTokenizer.from_pretrained(FOLDER).encode(TEXT)
    return torch.tensor([tokens])


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@torch.no_grad()
def test_logits_and_loss_are_theirs(ours, theirs, idx):
    expected = theirs(idx, labels=idx)
    logits, loss = ours(idx[:, :-1], idx[:, 1:])
    same(logits, expected.logits[:, :-1])
    same(loss, expected.loss)
    assert loss < 6  # it has learned English


def test_it_writes_what_they_write(ours, theirs, idx):
    expected = theirs.generate(idx, do_sample=False, min_new_tokens=40, max_new_tokens=40)
    assert torch.equal(ours.generate(idx, 40, temperature=0), expected)
