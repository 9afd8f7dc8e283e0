"""An exported run of any attention and residual, opened by transformers: the same model, from its folder only."""

import importlib
import json
import os
import subprocess
import sys

import datasets
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT, TINY, refused
from cover import FEW, perturb, settings
from cover import TINY as SHAPE
from data.huggingface import from_pretrained, save_pretrained
from data.tokenizer import END, SPLIT, BPETokenizer, CharTokenizer
from model import GPT, GPTConfig

STANDARD = {"attention": "standard"}
BYTES = BPETokenizer({bytes([i]): i for i in range(256)}, SPLIT, {END: 256})


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a_model(), exported."""
    folder = tmp_path_factory.mktemp("model") / "exported"
    save_pretrained(a_model(), folder)
    return folder


def opened(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def exported(model, folder):
    save_pretrained(model, folder / "exported")
    return opened(folder / "exported")


def ids(*shape):
    return torch.randint(19, shape, generator=torch.Generator().manual_seed(0))


def agree(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [STANDARD, *FEW[1:]])
@torch.no_grad()
def test_it_is_the_same_model(row, tmp_path):
    """... and is so again when transformers has saved it."""
    model = perturb(GPT(GPTConfig(**SHAPE | dict(dropout=0.5), **row))).eval()
    theirs = exported(model, tmp_path)
    assert (tmp_path / "exported" / "model.py").exists() == (row != STANDARD)
    theirs.save_pretrained(tmp_path / "again")
    for opened_again in theirs, opened(tmp_path / "again"):
        agree(opened_again(ids(2, 16)).logits, model(ids(2, 16))[0])
        assert opened_again.num_parameters() == model.get_num_params()


@torch.no_grad()
def test_the_loss_is_of_the_next_labels(folder):
    idx, labels = ids(2, 16), ids(2, 16)
    labels[0, :7] = labels[1, 3] = -100
    targets = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    agree(opened(folder)(idx, labels=labels).loss, a_model()(idx, targets)[1])


@torch.no_grad()
def test_padding(folder):
    """On the right it changes nothing. All else, which a causal model without a mask would get wrong, is refused."""
    theirs, idx = opened(folder), ids(2, 16)
    alone = theirs(idx[:1, :9], inputs_embeds=None, use_cache=False).logits
    mask = torch.ones_like(idx)
    mask[0, 9:] = idx[0, 9:] = 0
    agree(theirs(idx, attention_mask=mask).logits[:1, :9], alone)
    for named, call in {
        "a 0 before a 1: set tokenizer.padding_side = 'right'": lambda: theirs(idx, attention_mask=mask.flip(1)),
        "texts of one length": lambda: theirs.generate(idx, attention_mask=mask, max_new_tokens=1),
        "position_ids is not supported: leave it out": lambda: theirs(idx, position_ids=torch.arange(16)),
        "context has 17 tokens; it must be 1 to block_size = 16": lambda: theirs(ids(1, 17)),
    }.items():
        with pytest.raises(ValueError, match=named):
            call()


@torch.no_grad()
def test_it_generates_past_the_end_of_the_context(folder):
    theirs = opened(folder)
    written = theirs.generate(ids(1, 10), do_sample=False, max_new_tokens=20)
    for t in (16, 29):
        assert written[0, t] == theirs(written[:, t - 16 : t]).logits[0, -1].argmax()


@pytest.mark.parametrize("row", [STANDARD, {"attention": "w2", "residual": "m1"}])
def test_no_token_is_generated_that_the_tokenizer_lacks(row, tmp_path):
    """A large vocabulary is rounded up, so the embedding has more rows than there are tokens."""
    model = perturb(GPT(GPTConfig(**SHAPE | {"vocab_size": 300} | row)))
    save_pretrained(model, tmp_path / "exported", BYTES)
    theirs = opened(tmp_path / "exported")
    torch.manual_seed(0)
    written = theirs.generate(ids(20, 8), do_sample=True, temperature=9.0, top_k=0, max_new_tokens=20)
    assert written.max() < BYTES.vocab_size <= theirs(ids(20, 8)).logits[:, -1].argmax(-1).max()


ROWS = [{"input_ids": row, "labels": row} for row in ids(2, 16).tolist()]
TRAINING = dict(use_cpu=True, report_to=[], logging_steps=1, max_steps=12, learning_rate=0.02)


def learns(trainer):
    """Train by transformers' Trainer, or trl's, until the loss has fallen."""
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]


def learns_by_trainer(model, output):
    pytest.importorskip("accelerate")
    options = dict(per_device_train_batch_size=1, gradient_accumulation_steps=2)
    arguments = transformers.TrainingArguments(output_dir=output, **TRAINING, **options)
    learns(transformers.Trainer(model, arguments, train_dataset=ROWS))


def test_trainer(folder, tmp_path):
    learns_by_trainer(opened(folder), tmp_path)


def test_low_rank_adapters_train_and_merge(folder, tmp_path):
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4)
    adapted = peft.get_peft_model(opened(folder), adapters)
    learns_by_trainer(adapted, tmp_path)
    with torch.no_grad():
        loss = adapted.eval()(ids(2, 16), labels=ids(2, 16)).loss
        agree(adapted.merge_and_unload()(ids(2, 16), labels=ids(2, 16)).loss, loss)


def test_supervised_fine_tuning_by_trl(tmp_path):
    trl = pytest.importorskip("trl")
    save_pretrained(a_model(vocab_size=BYTES.vocab_size, block_size=64), tmp_path / "exported", BYTES)
    model, tokenizer = opened(tmp_path / "exported"), AutoTokenizer.from_pretrained(tmp_path / "exported")
    texts = datasets.Dataset.from_dict({"text": ["the quick brown fox", "the dog"] * 4})
    options = trl.SFTConfig(output_dir=tmp_path, **TRAINING, max_length=64, gradient_checkpointing=False)
    learns(trl.SFTTrainer(model, options, train_dataset=texts, processing_class=tokenizer))


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
    """Return a function that imports a copy of model.py in which `old` is `new`."""

    def load(old, new):
        source = (ROOT / "model.py").read_text(encoding="utf-8")
        (tmp_path / "own.py").write_text(source.replace(old, new, 1), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "own", raising=False)
        return importlib.import_module("own")

    return load


@pytest.mark.parametrize("old, new", [
    ("return q * self.D**-0.5, k", "return 2 * q * self.D**-0.5, k"),  # what it computes
    ("gate_proj = linear(config.n_embd, config.n_inner", "gate_proj = linear(config.n_embd, 1"),  # a shape
    ("self.dropout = ", "self.q_norm = nn.RMSNorm(self.D)\n        self.dropout = "),  # what it has
    ("self.dropout = ", "self.later = nn.Parameter(torch.ones(1))\n        self.dropout = "),  # in no logit
])  # fmt: skip
@torch.no_grad()
def test_an_edited_standard_model_takes_its_code_along(tmp_path, edited, old, new):
    own = edited(old, new)
    model = perturb(own.GPT(own.GPTConfig(**SHAPE))).eval()
    agree(exported(model, tmp_path)(ids(2, 16)).logits, model(ids(2, 16))[0])
    assert (tmp_path / "exported" / "model.py").exists()


def test_an_edited_method_needs_no_repository(tmp_path, edited):
    """In a process of its own, which can import the folder only: model.py has travelled as it was edited."""
    own = edited("return q * self.D**-0.5, k", "return 2 * q * self.D**-0.5, k")
    tokenizer = CharTokenizer("the quick brown dog")
    options = settings("standard", "m3.2", vocab_size=tokenizer.vocab_size)
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
    assert "out/exported already exists" in refused(repo, "sample.py --export=out/exported", capsys)
    with pytest.raises(ValueError, match="out/exported is a 'gpt_variant' model; only 'llama' is supported"):
        from_pretrained("out/exported")
