"""From a Llama or a run to another run, and from a run to a Llama: --init_from=hf: and run:, --tokenizer, --export."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from conftest import TEXT, TINY, load, log_of, refused
from data.dataset import load_dataset
from data.huggingface import from_pretrained, save_pretrained
from data.prepare import prepare
from data.tokenizer import END, BPETokenizer, HFTokenizer, first_tokens, hf_tokenizer, tokenizer_from_state, train_bpe
from model import GPT, GPTConfig

RUN = f"{TINY} --dataset=shakespeare_bpe"
SAMPLES = ["", "the dog", " a  b \n\n", "Ünglück, 瓶子 🦊!", "<s> and </s>"]


def like_llama_3():
    """Return byte pairs, in the manner of Llama 3: every text begins with a special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], **options)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the folder of a small random Llama with its tokenizer, and more rows in its embedding than tokens."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    torch.manual_seed(0)
    shape = dict(vocab_size=352, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=48, rope_theta=500.0)
    save_pretrained(GPT(GPTConfig(block_size=64, **shape)), folder)
    PreTrainedTokenizerFast(tokenizer_object=like_llama_3(), bos_token="<s>").save_pretrained(folder)
    return folder


def test_the_tokenizer_is_theirs(llama):
    theirs = AutoTokenizer.from_pretrained(llama)
    ours = hf_tokenizer(str(llama))
    again = tokenizer_from_state(json.loads(json.dumps(ours.state())))
    assert again.state() == ours.state()
    for text in SAMPLES:
        assert ours.encode(text) == again.encode(text) == theirs.encode(text)
        ids = ours.encode_array(text).tolist()  # special tokens are plain text in it
        assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.vocab_size == len(theirs) and ours.document_start == [theirs.bos_token_id]
    assert first_tokens(ours) == [theirs.bos_token_id]


def test_the_end_that_some_tokenizers_put_is_not_part_of_a_prompt():
    tokenizer = like_llama_3()
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=special)
    ours = HFTokenizer(tokenizer.to_str())
    assert tokenizer.encode("the dog").ids == [*ours.encode("the dog"), 1] and ours.document_start == [0]
    tokenizer.post_processor = processors.TemplateProcessing("$A", special_tokens=[])
    assert HFTokenizer(tokenizer.to_str()).document_start == []
    tokenizer.add_special_tokens([END])
    ours = HFTokenizer(tokenizer.to_str())
    assert ours.document_start == [tokenizer.token_to_id(END)] and ours.encode("a") == tokenizer.encode("a").ids


def test_a_llama_is_fine_tuned_resumed_and_sampled(repo, llama):
    repo(["data/shakespeare_bpe/prepare.py", f"--tokenizer=hf:{llama}"])
    repo(f"train.py {RUN} --dtype=float32 --out_dir=out/tuned --init_from=hf:{llama}")
    config = log_of("out/tuned", "start")[0]["config"]
    assert [config[name] for name in ("n_layer", "n_kv_head", "vocab_size", "rope_theta")] == [2, 2, 352, 500]
    x, y = load_dataset("data/shakespeare_bpe").batch(1337, 0, 0, 2, 16)
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(llama)(x).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    assert log_of("out/tuned", "step")[0]["loss"] == pytest.approx(expected.item(), abs=1e-4)

    repo(f"train.py {RUN} --out_dir=out/tuned --max_iters=6 --init_from=resume")
    assert log_of("out/tuned", "resume")[0]["settings"]["init_from"] == f"hf:{llama}"
    assert "the dog" in repo(["sample.py", "--num_samples=1", "--max_new_tokens=20", "--start=the dog"])


def test_a_llama_begins_a_run_of_another_method(repo, llama):
    """It has the Llama's weights and shape, whatever shape is given, and the given method, whose weights are named."""
    repo(["data/shakespeare_bpe/prepare.py", f"--tokenizer=hf:{llama}"])
    given = "--max_iters=1 --learning_rate=0 --n_layer=3 --attention=w2 --residual=m3.2"
    shown = repo(f"train.py {RUN} {given} --out_dir=out/w2 --init_from=hf:{llama}")
    assert "model   w2 attention, m3.2 residual: 2 layers, width 32, 4 heads, " in shown
    saved, (start,) = load("out/w2/ckpt.pt"), log_of("out/w2", "start")
    old = from_pretrained(llama).state_dict()
    new = {re.sub(r"blocks\.\d+", "blocks.*", name) for name in saved["model"].keys() - old.keys()}
    assert all(torch.equal(saved["model"][name], tensor) for name, tensor in old.items())
    assert f"new weights, not from hf:{llama}: {', '.join(sorted(new))}" in start["notes"]
    assert f"n_layer = 3 has no effect: hf:{llama} has 2" in start["notes"]
    assert (saved["config"]["n_layer"], saved["settings"]["n_layer"], saved["config"]["block_size"]) == (2, 2, 16)


SOURCE = f"{TINY} --n_head=4 --n_kv_head=2 --tie_weights=true --learning_rate=0.03 --out_dir=out/source"
NEXT = f"{TINY} --out_dir=out/next --init_from=run:out/source --max_iters=1 --learning_rate=0"
BECOMES = [  # the source's method, what is given, and whether its attention's parameters and its mix come along
    ("--attention=w2 --residual=m4.2", "--residual=m3.2 --keep_input --qk_scale=5.3", True, False),
    ("--attention=summed_qk --qk_scale=5.6 --residual=m3.2", "--attention=w2", False, True),
    ("--attention=summed_qk --qk_scale=5.4", "--qk_scale=5.6 --residual=m3.2", False, False),
]


@pytest.mark.parametrize("source, given, same_attention, same_residual", BECOMES)
def test_a_run_starts_where_another_is(repo, source, given, same_attention, same_residual):
    """It has all weights that both have; what only the new model has is as in one that starts from scratch."""
    repo(f"train.py {SOURCE} {source}")
    repo(f"train.py {NEXT} {given}")
    old, new = load("out/source/best.pt"), load("out/next/ckpt.pt")
    torch.manual_seed(1337)
    initial = GPT(GPTConfig(**new["config"])).state_dict()
    own = {name for name in initial if ".attn." in name and "_proj." not in name}
    mix = {name for name in initial if name.endswith(".mix")}
    left = (set() if same_attention else own) | (set() if same_residual else mix)
    for name, tensor in new["model"].items():
        torch.testing.assert_close(tensor, initial[name] if name in left else old["model"][name], rtol=0, atol=0)
    names = sorted({re.sub(r"blocks\.\d+", "blocks.*", name) for name in left})
    noted = [note for note in log_of("out/next", "start")[0]["notes"] if note.startswith("new weights")]
    assert noted == ([f"new weights, not from run:out/source: {', '.join(names)}"] if names else [])


def test_what_makes_the_model_comes_from_the_other_run(repo):
    repo(f"train.py {SOURCE} --attention=w2 --sigma=diagonal --residual=m1 --keep_input --dropout=0.2")
    repo(f"train.py {NEXT} --n_layer=3 --residual=m4.1 --block_size=8")
    (start,), old = log_of("out/next", "start"), load("out/source/best.pt")
    assert start["config"] == old["config"] | {"residual": "m4.1", "block_size": 8, "dropout": 0.0}
    assert "n_layer = 3 has no effect: run:out/source has 2" in start["notes"]


def test_another_run_needs_its_tokens(repo, capsys):
    repo(f"train.py {SOURCE} --residual=m1")
    Path("my.txt").write_text("the lazy dog\n" * 99)
    repo("data/text/prepare.py my.txt")
    error = refused(repo, f"train.py {NEXT} --dataset=text", capsys)
    cure = "python data/text/prepare.py TEXT --name=NAME --tokenizer=run:out/source, then add --dataset=NAME"
    assert f"data/text does not use the tokenizer of out/source/best.pt: prepare its text with {cure}\n" in error
    repo("data/text/prepare.py my.txt --tokenizer=run:out/source")
    repo(f"train.py {NEXT} --dataset=text")


STRANGE = """“Ünglück”, 瓶子 🦊 'n't' "it's" . , ! ?  \t\n\n <|endoftext|> \x00\x7f\u2e7f\u2e80\U0010ffff"""
ENDS = ["\n", " ", "   ", " the dog ", "\n\nthe\n", "dog .", "it 's"]


GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@pytest.mark.parametrize("kind", ["char", "bpe", "like GPT-2", "like Llama 3"])
def test_transformers_alone_writes_the_same_text(repo, tmp_path, monkeypatch, caplog, kind):
    text = TEXT + STRANGE * 5
    tokenizer = {"char": "char", "bpe": "bpe", "like GPT-2": "gpt2"}.get(kind, f"hf:{tmp_path}")
    if kind == "like Llama 3":
        PreTrainedTokenizerFast(tokenizer_object=like_llama_3(), bos_token="<s>").save_pretrained(tmp_path)
    ranks = train_bpe(text, 300).ranks  # which need no download
    monkeypatch.setattr("data.prepare.gpt2_tokenizer", lambda: BPETokenizer(ranks, GPT2_SPLIT, {END: len(ranks)}))
    prepare("data/text", text, "test", tokenizer)
    repo(f"train.py {TINY} --block_size=64 --max_iters=30 --learning_rate=1e-2 --dataset=text --out_dir=out/run")
    shown = repo("sample.py --export=out/exported")
    assert shown == "out/exported: model and tokenizer for transformers\n"

    ours = load_dataset("data/text").tokenizer
    theirs = AutoTokenizer.from_pretrained("out/exported")
    model = AutoModelForCausalLM.from_pretrained("out/exported")
    assert len(theirs) == ours.vocab_size == model.config.vocab_size
    for sample in (text, STRANGE, *ENDS):
        ids = theirs(sample).input_ids
        assert ids == ours.encode(sample)
        assert theirs.decode(ids) == ours.decode(ids)
    first = ours.document_start[0] if ours.document_start else None
    last = first if kind == "like GPT-2" else None  # where a text of another tokenizer ends, only its maker knows
    for keeps in (theirs, model.config, model.generation_config):
        assert (keeps.bos_token_id, keeps.eos_token_id) == (first, last)

    for start in ("dog .\n ", "🦊 the"):
        sampled = repo(["sample.py", f"--start={start}", "--temperature=0", "--max_new_tokens=40", "--num_samples=1"])
        written = model.generate(**theirs(start, return_tensors="pt"), do_sample=False, max_new_tokens=40)
        text = theirs.decode(written[0], skip_special_tokens=True)
        assert sampled.split("-" * 80 + "\n")[1] == text + "\n"
    assert not caplog.records  # generate has nothing to warn of


def test_bad_starts(repo, llama, monkeypatch, capsys):
    repo("data/shakespeare_bpe/prepare.py --vocab_size=300")
    for start, words in {
        f"hf:{llama}": f"data/shakespeare_bpe does not use the tokenizer of {llama}: ",
        f"hf:{llama} --residual=m9": "residual = 'm9' is invalid: it must be one of standard, m1",
    }.items():
        assert words in refused(repo, f"train.py {RUN} --init_from={start}", capsys)
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refused(repo, f"train.py {RUN} --init_from=hf:{llama}", capsys)
    assert "pip install 'transformers>=5.17'" in error
