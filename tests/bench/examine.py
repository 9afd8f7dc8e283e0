"""
A variant's code, looked at in a process of its own, which answers in a JSON file:

    python examine.py HOME WINDOWS ANSWER --name=value ...    before training: what a step costs, and leaks
    python examine.py HOME WINDOWS ANSWER RUN                 after: the loss of a run's weights

The loss is that of a model that cannot see the future: at a place drawn at random in each window, the target must be as
likely after the tokens up to there alone as in the whole window. Nothing that the code says about itself is believed.
"""

import json
import multiprocessing
import os
import secrets
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from operations import STEPS, train_briefly, use_plain_attention

PAIRS, FEWER = 1024, 64  # windows that are read twice, after training and before
EXACT = 1e-3  # nats by which two readings may differ in float32
ROUNDING = 3e-3  # where some differ by more, nats within which their mean is, by five standard errors


class Refused(Exception):
    """Why a variant cannot take part."""


# -- the loss, in float32, and whether it needs the future -------------------------------------------------------


def load(checkpoint):
    """Return the model of a checkpoint, and the checkpoint."""
    from model import GPT, GPTConfig

    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = GPT(GPTConfig(**saved["config"]))
    model.load_state_dict(saved["model"])
    device = saved["settings"]["device"]
    return model.to(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device).eval(), saved


@torch.no_grad()
def log_p(model, x, y):
    """Return log p (B, T) of the targets y, in nats, whose model is not told them. A target of -1 stands for none."""
    x, y = (part.long().clamp(min=0).to(next(model.parameters()).device) for part in (x, y))
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # no TF32
    logits = model(x, torch.zeros_like(y))[0].float()
    return (logits.gather(-1, y[..., None])[..., 0] - logits.logsumexp(dim=-1)).cpu()


def read_windows(model, windows, batch_size):
    """Return log p (N, T) of all targets, in whole windows."""
    batches = zip(windows["x"].split(batch_size), windows["y"].split(batch_size))
    return torch.cat([log_p(model, x, y) for x, y in batches])


def read_prefixes(model, windows, most):
    """Return (window, place, log p of its target after the tokens up to there alone) of `most` windows, and the seed.

    Prefixes of one length share a batch, but for one of each length. No window is read twice.
    """
    seed = secrets.randbits(63)
    random, x, y = torch.Generator().manual_seed(seed), windows["x"], windows["y"]
    rows = torch.randperm(len(x), generator=random)[:most]
    places = (torch.rand(len(rows), generator=random) * (y[rows] >= 0).sum(dim=1)).int()  # -1 is last in a window
    lengths, found = places.unique(), []
    for place in lengths[torch.randperm(len(lengths), generator=random)].tolist():
        for batch in filter(len, rows[places == place].tensor_split([1])):
            read = log_p(model, x[batch, : place + 1], y[batch, : place + 1])[:, -1].tolist()
            found += [(row, place, told) for row, told in zip(batch.tolist(), read)]
    return found, seed


def check_future(model, windows, whole, prefixes):
    """Raise Refused unless targets are as likely in `whole` windows as after their prefixes alone."""
    rows, places, told = map(torch.tensor, zip(*prefixes))
    read = torch.cat((told, whole[windows["y"] >= 0]))
    if not read.isfinite().all():
        raise Refused(f"its loss is not finite: log p of a target is {read[~read.isfinite()][0]}")
    difference = (whole[rows, places] - told).double()
    error = difference.std() / len(rows) ** 0.5
    if difference.abs().max() < EXACT or difference.mean().abs() + 5 * error < ROUNDING:
        return
    row, place, told = prefixes[difference.abs().argmax()]
    x, y = windows["x"][[row]], windows["y"][[row]]
    other = x.clone()
    other[:, place + 1 :] = x[:, place + 1 :] == 0  # 0 becomes 1, all others 0
    alone, again, changed = (log_p(model, tokens, y)[0, place].item() for tokens in (x, x, other))
    if abs(alone - again) > EXACT:
        why = "equal evaluations differ, so it is random or keeps state"
    elif abs(alone - changed) < EXACT < abs(alone - told):
        why = "it depends on the length of the context, though not on the tokens in it"
    else:
        why = "it sees the future, or other sequences in its batch"
    read = f"{told:.4f} after the {place + 1} tokens up to there, {whole[row, place]:.4f} in its whole window"
    raise Refused(f"{why}: log p of a target is {read}")


# -- before and after training -----------------------------------------------------------------------------------


def look_before(home, windows, options):
    """Return what a step of train.py costs. Raise Refused if its weights, after some steps, need the future."""
    facts = {}
    with tempfile.TemporaryDirectory(prefix="examine-") as folder:
        if "--device=cpu" in options:
            use_plain_attention()
        try:
            facts["flops_per_step"] = train_briefly(home, options, folder)
        except Exception as error:  # perhaps of the counter
            if "diverged" in str(error):
                raise Refused(str(error)) from None
            facts["trouble"] = "undecided", f"its operations cannot be counted: {type(error).__name__}: {error}"
            folder = f"{folder}/uncounted"
        if "trouble" in facts:
            train_briefly(home, options, folder, count=False)  # raises what is the code's own
        checkpoint = f"{folder}/{STEPS[1]}/ckpt.pt"
        model, saved = load(checkpoint)
        facts["parameters"] = sum(p.numel() for p in model.parameters())
        few = {name: windows[name][:FEWER] for name in ("x", "y")}
        with torch.no_grad():  # away from zeros and ones, behind which a part may hide
            for p in model.parameters():
                if p.requires_grad:
                    p += 0.1 * torch.randn_like(p).sign()
        if not read_windows(model, few, FEWER).isfinite().all():  # out of a parameter's domain
            model, _ = load(checkpoint)
        prefixes, _ = read_prefixes(model, few, FEWER)
        check_future(model, few, read_windows(model, few, saved["settings"]["batch_size"]), prefixes)
    return facts


def look_after(home, windows, run):
    """Return the loss of a run's weights. Another process reads the prefixes: neither knows what the other reads."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")) as other:
        prefixes = other.submit(read_prefixes_of, home, windows, run)
        model, saved = load(run / "ckpt.pt")
        whole = read_windows(model, windows, saved["settings"]["batch_size"])
        found, seed = prefixes.result()
    check_future(model, windows, whole, found)
    return {"step": saved["iter_num"], "loss": -whole[windows["y"] >= 0].double().mean().item(), "seed": seed}


def read_prefixes_of(home, windows, run):
    sys.path.insert(0, home)
    return read_prefixes(load(run / "ckpt.pt")[0], windows, PAIRS)


def main(home, windows, answer, *source):
    windows, answer = torch.load(windows, weights_only=True), Path(answer)
    sys.path.insert(0, home)
    del sys.modules["operations"]  # the variant may have one
    try:
        before = source[0].startswith("--")
        facts = look_before(home, windows, source) if before else look_after(home, windows, Path(source[0]))
    except Refused as why:
        facts = {"trouble": ("refused", str(why))}
    temporary = answer.with_name(f"{answer.name}.tmp")
    temporary.write_text(json.dumps(facts))
    os.replace(temporary, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
