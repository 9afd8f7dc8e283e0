"""What each variant costs, whether it is sound, and under which name its runs are kept: by what it computes."""

import ast
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from config.runtime.devices import pick_compile, pick_dtype
from config.runtime.errors import UserError, file_errors
from config.runtime.files import sha256
from runs import EXAMINE, WITH_PARENT, read_log

KNOWN = "fingerprints.jsonl"  # in the folder of the runs
FACTS = ("parameters", "flops_per_token", "identity", "refused", "crashed")


class CodeError(Exception):
    """A variant's code has failed; its traceback has been printed."""


def identify(variants, folder, windows, device):
    """Return the variants with what is known of them. Only what is new is examined.

    The identity changes only if the fingerprint does, so an edit that changes no number keeps its runs. On another
    machine or PyTorch, which may round differently, any change of code changes it.
    """
    rows = read_json_lines(folder / KNOWN)
    questions = {variant: question_of(variant, device) for variant in variants}
    keys = {variant: key_of(question) for variant, question in questions.items()}
    new = [one for one in variants if not find(rows, key=keys[one], code=one.home.name)]
    if new:
        print(f"examining {', '.join(variant.name for variant in new)}", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(max(1, os.cpu_count() // 2)) as pool:
        for facts in pool.map(lambda one: look(one, windows, questions[one], keys[one]), new):
            rows.append(facts)
            if not facts["crashed"]:
                remember(folder, facts)
    return [with_facts(variant, rows, keys[variant]) for variant in variants]


def with_facts(variant, rows, key):
    """Return a variant with what is known of it. Its runs go from the first code that computes the same."""
    row = find(rows, key=key, code=variant.home.name)
    first = variant.home.with_name(find(rows, key=row["key"], identity=row["identity"])["code"])
    facts = {name: row[name] for name in FACTS}
    return replace(variant, home=first if first.exists() else variant.home, **facts)


def find(rows, **facts):
    return next((row for row in rows if facts.items() <= row.items()), None)


def question_of(variant, device):
    """Return what examine.py is asked about: the settings, with what train.py will choose for "auto"."""
    dtype = str(pick_dtype(variant.settings["dtype"], device)).removeprefix("torch.")
    compile = pick_compile(variant.settings["compile"], device)
    return variant.settings | {"device": device.type, "dtype": dtype, "compile": compile}


def key_of(question):
    """Return the key of an answer, which another examine.py may give in another way."""
    return sha256(json.dumps(question, sort_keys=True).encode() + EXAMINE.read_bytes())[:16]


@file_errors()
def read_json_lines(path):
    """Return the objects in a file of JSON lines, without those that a kill has torn."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


@file_errors()
def remember(folder, row):
    with open(folder / KNOWN, "ab") as file:  # another comparison may add to it too
        file.write(b"\n" + json.dumps(row).encode() + b"\n")  # the last line may be torn


def look(variant, windows, question, key):
    """Return the facts about a variant, also if its code fails."""
    code, nothing = variant.home.name, {"parameters": 0, "flops_per_token": 0.0, "refused": "", "crashed": ""}
    facts = {"key": key, "code": code, "identity": code, **nothing}
    with tempfile.TemporaryDirectory(prefix="examine-") as folder:
        asked, answer = Path(folder) / "settings.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(question))
        try:
            ask(variant, [EXAMINE, variant.home, windows, answer, asked])
            facts |= json.loads(answer.read_text())
            if not facts["refused"]:
                facts["identity"] = fingerprint(variant, Path(folder) / "run")[:8]
        except CodeError as error:
            facts["crashed"] = str(error)
    return facts


def fingerprint(variant, folder) -> str:
    """Return the SHA-256 of the losses and weights of a few steps of train.py, at full size, by one CPU thread.

    Only what is repeated is shortened: steps, sequences in a batch, micro-steps and windows to evaluate on.
    """
    settings, shortened = dict(variant.settings), {"batch_size": 2, "grad_accum_steps": 2, "warmup_iters": 2}
    settings |= {name: min(most, settings[name]) for name, most in shortened.items()}
    settings |= {"max_iters": 4, "eval_interval": 4, "checkpoint_interval": 4, "log_interval": 1, "eval_tokens": 64}
    settings |= {"device": "cpu", "compile": "false", "tensorboard": False, "wandb": False, "seed": 0}
    options = [f"--{name}={value}" for name, value in variant.changed(settings).items()]
    ask(variant, [variant.home / "train.py", *options, f"--out_dir={folder}"], folder)
    steps = ast.dump(ast.parse((variant.home / "train.py").read_text()))  # what it does later, a few steps do not show
    numbers = [[line.get("loss"), line.get("val_loss")] for line in read_log(folder)]
    lengths = [variant.settings[name] for name in (*shortened, "max_iters", "compile")]
    content = json.dumps([steps, numbers, lengths]).encode()
    checkpoint = folder / "ckpt.pt"
    if checkpoint.exists():  # none if it has diverged
        weights = torch.load(checkpoint, weights_only=True)["model"].values()
        content += b"".join(weight.reshape(-1).view(torch.uint8).numpy().tobytes() for weight in weights)
    return sha256(content)


def ask(variant, words, run=None):
    """Run a program of the variant's code. Raise UserError for a mistake in settings, CodeError for a slip in code."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    options = {"env": environment, "stdin": subprocess.DEVNULL, "preexec_fn": WITH_PARENT}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    lines = done.stderr.strip().splitlines() or ["it ended without any output"]
    diverged = run and any(line["event"] == "diverged" for line in read_log(run))
    if done.returncode < 0:
        raise UserError(f"{variant.name}: ended by signal {-done.returncode} while examined: rerun the command")
    if done.returncode == 2 and not diverged:
        raise UserError(f"{variant.name}: {lines[-1]}")
    if done.returncode and not diverged:
        print(f"{variant.name}:\n{done.stderr}", file=sys.stderr)
        raise CodeError(lines[-1])
