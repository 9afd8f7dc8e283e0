"""An exported run of any attention and residual, opened by transformers: the same model, from its folder only."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import TINY, refused
from cover import TINY as SHAPE
from cover import columns, each, perturb, settings
from data.huggingface import from_pretrained, save_pretrained
from data.tokenizer import CharTokenizer
from model import GPT, GPTConfig

STANDARD = {"attention": "standard"}


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """A folder for the code that transformers copies out of what it opens, in the place of the user's own."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", sys.path[:])
        yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def a_model(**options):
    return perturb(GPT(GPTConfig(**settings("w2-scalar", "m1", **options)))).eval()


def opened(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def exported(model, folder):
    save_pretrained(model, folder)
    return opened(folder)


def ids(*shape):
    return torch.randint(19, shape, generator=torch.Generator().manual_seed(0))


def agree(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [STANDARD, *each(columns())[1:]])
@torch.no_grad()
def test_it_is_the_same_model(row, tmp_path):
    model = perturb(GPT(GPTConfig(**SHAPE, **row))).eval()
    theirs = exported(model, tmp_path / "exported")
    agree(theirs(ids(2, 16)).logits, model(ids(2, 16))[0])
    assert (tmp_path / "exported" / "model.py").exists() == (row != STANDARD)


@torch.no_grad()
def test_saved_by_transformers_it_is_the_same_again(tmp_path):
    model = a_model(tie_weights=True, bias=True, n_kv_head=2, dropout=0.5, rope_theta=99.0)
    theirs = exported(model, tmp_path / "exported")
    theirs.save_pretrained(tmp_path / "again")
    again = opened(tmp_path / "again")
    agree(again(ids(2, 16)).logits, model(ids(2, 16))[0])
    assert again.num_parameters() == model.get_num_params() and not again.training


@torch.no_grad()
def test_the_loss_is_of_the_next_labels(tmp_path):
    model = a_model()
    theirs = exported(model, tmp_path / "exported")
    idx, labels = ids(2, 16), ids(2, 16)
    labels[0, :7] = labels[1, 3] = -100
    targets = labels.roll(-1, dims=1)
    targets[:, -1] = -100
    expected = model(idx, targets.clamp(min=-1))[1]
    agree(theirs(idx, labels=labels).loss, expected)


@torch.no_grad()
def test_padding(tmp_path):
    """On the right it changes nothing. All else, which a causal model without a mask would get wrong, is refused."""
    theirs = exported(a_model(), tmp_path / "exported")
    idx = ids(2, 16)
    alone = theirs(idx[:1, :9]).logits
    mask = torch.ones_like(idx)
    mask[0, 9:] = idx[0, 9:] = 0
    agree(theirs(idx, attention_mask=mask).logits[:1, :9], alone)
    refused = {
        "a 0 before a 1: set tokenizer.padding_side = 'right'": lambda: theirs(idx, attention_mask=mask.flip(1)),
        "texts of one length": lambda: theirs.generate(idx, attention_mask=mask, max_new_tokens=1),
        "context has 17 tokens; it must be 1 to block_size = 16": lambda: theirs(ids(1, 17)),
    }
    for named, call in refused.items():
        with pytest.raises(ValueError, match=named) as error:
            call()
        assert "\n" not in str(error.value)


@torch.no_grad()
def test_it_generates_past_the_end_of_the_context(tmp_path):
    theirs = exported(a_model(), tmp_path / "exported")
    written = theirs.generate(ids(1, 10), do_sample=False, max_new_tokens=20)
    for t in (16, 29):
        assert written[0, t] == theirs(written[:, t - 16 : t]).logits[0, -1].argmax()


OWN = '''


class Doubled(Attention):
    """softmax(2 q kᵀ/√d_k) V."""

    def score_vectors(self, q, k, x, earlier):
        return super().score_vectors(2 * q, k, x, earlier)


ATTENTIONS["doubled"] = Doubled
CHOICES["attention"] += ("doubled",)
'''
ALONE = """
import importlib.util, json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
assert importlib.util.find_spec("model") is None
model = AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("exported", trust_remote_code=True)
prompt = tokenizer("the dog", return_tensors="pt")
written = model.generate(**prompt, do_sample=False, max_new_tokens=9)[0]
print(json.dumps([tokenizer.decode(written), model(**prompt).logits.tolist()]))
"""


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Return a function that imports a changed copy of model.py."""

    def load(change):
        path = tmp_path / "own.py"
        source = Path(sys.modules[GPT.__module__].__file__).read_text(encoding="utf-8")
        path.write_text(change(source), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("own", path)
        own = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "own", own)
        spec.loader.exec_module(own)
        return own

    return load


@pytest.mark.parametrize("old, new", [
    ("return q * self.D**-0.5, k", "return 2 * q * self.D**-0.5, k"),  # what it computes
    ("self.dropout = ", "self.q_norm = RMSNorm(self.D)\n        self.dropout = "),  # what it has
])  # fmt: skip
@torch.no_grad()
def test_an_edited_standard_model_takes_its_code_along(tmp_path, edited, old, new):
    own = edited(lambda source: source.replace(old, new, 1))
    model = perturb(own.GPT(own.GPTConfig(**SHAPE))).eval()
    theirs = exported(model, tmp_path / "exported")
    assert (tmp_path / "exported" / "model.py").exists()
    agree(theirs(ids(2, 16)).logits, model(ids(2, 16))[0])


def test_a_kind_of_ones_own_needs_no_repository(tmp_path, edited):
    """In a process of its own, which can import the folder only: model.py has travelled with what was added to it."""
    own = edited(lambda source: source + OWN)
    tokenizer = CharTokenizer("the quick brown dog")
    options = settings("standard", "m3.2", vocab_size=tokenizer.vocab_size) | {"attention": "doubled"}
    model = perturb(own.GPT(own.GPTConfig(**options))).eval()
    save_pretrained(model, tmp_path / "alone" / "exported", tokenizer)

    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-I", "-X", "utf8", "-c", ALONE]
    shown = subprocess.check_output(command, cwd=tmp_path / "alone", env=environment, text=True, encoding="utf-8")
    text, logits = json.loads(shown.splitlines()[-1])
    idx = torch.tensor([tokenizer.encode("the dog")])
    assert text == tokenizer.decode(model.generate(idx, 9, temperature=0)[0])
    with torch.no_grad():
        agree(torch.tensor(logits), model(idx)[0])


def test_a_buffer_that_would_be_lost_is_refused(tmp_path):
    model = a_model()
    model.blocks[1].attn.register_buffer("slope", torch.ones(1), persistent=False)
    with pytest.raises(ValueError, match="the buffer blocks.1.attn.slope is not saved with the weights"):
        save_pretrained(model, tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_a_run_is_exported_by_sample(repo, capsys):
    repo(f"train.py {TINY} --attention=w2 --residual=m1 --out_dir=out/m1")
    shown = repo("sample.py --export=out/exported")
    assert shown == "out/exported: model and tokenizer for transformers (with trust_remote_code=True)\n"
    theirs = opened("out/exported")
    tokenizer = AutoTokenizer.from_pretrained("out/exported", trust_remote_code=True)
    sampled = repo(["sample.py", "--start=the dog", "--temperature=0", "--max_new_tokens=9", "--num_samples=1"])
    written = theirs.generate(**tokenizer("the dog", return_tensors="pt"), do_sample=False, max_new_tokens=9)
    assert sampled.split("-" * 80 + "\n")[1] == tokenizer.decode(written[0]) + "\n"
    assert "out/exported already exists" in refused(repo, "sample.py --export=out/exported", capsys)
    with pytest.raises(ValueError, match="out/exported is a 'gpt_variant' model; only 'llama' is supported"):
        from_pretrained("out/exported")
