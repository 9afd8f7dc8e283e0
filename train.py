"""
Trains a GPT: python train.py config/m1_shakespeare.py --max_iters=200

Settings are the plain variables below, changed by any number of config files and then by
--name=value; --help lists them. Continue a run with the same command and --init_from=resume.
"""

import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path

import torch

from config import check_range, fail, pick_device, pick_dtype, read_settings, user_errors
from data import first_tokens, load, replace_file
from model import GPT, GPTConfig
from sample import CHECKPOINT_VERSION, load_checkpoint, restore_model, write_text

# -----------------------------------------------------------------------------
# run
out_dir = ""  # folder of the run; empty: out/ and the names of the config files
init_from = "scratch"  # scratch, or resume: go on from the run's latest checkpoint
overwrite = False  # replace the run that the folder already holds
seed = 1337  # same seed and machine, same run
# data
dataset = "shakespeare_char"  # folder in data/; prepared at first use
batch_size = 16  # sequences per forward pass
grad_accum_steps = 1  # forward passes per step
block_size = 128  # tokens per sequence
# model
n_layer = 3  # blocks
n_head = 4  # attention heads
n_kv_head = 0  # key/value heads, for grouped-query attention; 0: as many as n_head
n_embd = 128  # width
n_inner = 0  # width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64
dropout = 0.0  # share of activations dropped, in attention and residual branches
bias = False  # biases in the linear layers
attention = "standard"  # standard, w2, summed_qk
qk_scale = "5.1"  # of summed_qk: 5.1 to 5.7
sigma = "scalar"  # of w2: scalar, diagonal
residual = "standard"  # standard, m1, m2, m3.1, m3.2, m4.1, m4.2
keep_input = False  # m1 to m4: add the residual that the sum replaces back to it
rope_theta = 10000.0  # base of RoPE's wavelengths
norm_eps = 1e-5  # of RMSNorm
tie_weights = False  # one matrix for embedding and head
# optimizer
optimizer = "adamw"  # adamw, or muon: Muon for the blocks' matrices, AdamW for the rest
max_iters = 800  # steps in all
learning_rate = 3e-3  # highest
warmup_iters = 100  # steps to get there
lr_decay = "cosine"  # cosine, linear or none, until max_iters
min_lr_frac = 0.1  # share of the learning rate left at the end
weight_decay = 0.1  # on matrices
beta1 = 0.9  # of AdamW
beta2 = 0.99  # of AdamW; 0.95 for large batches
grad_clip = 1.0  # largest norm of the gradient; 0: no limit
# watching
eval_interval = 200  # steps between evaluations, each followed by a checkpoint
eval_tokens = 131072  # tokens evaluated in each split, at most
log_interval = 10  # steps between log lines
sample_tokens = 300  # tokens of text shown at the end; 0: none
# system
device = "auto"  # auto, cpu, cuda, cuda:1, mps
dtype = "auto"  # auto, float32, bfloat16, float16
compile = "auto"  # auto: on a GPU; true, false

settings = read_settings(__file__)  # the above <- config files <- --name=value
globals().update(settings)

# what a resumed run may change; a change of anything else would make it another run
MAY_CHANGE = {"out_dir", "init_from", "overwrite", "max_iters", "device", "compile"}
MAY_CHANGE |= {"eval_interval", "eval_tokens", "log_interval", "sample_tokens"}

# -----------------------------------------------------------------------------
# set-up: where, on what, with which model


def check_settings():
    """Raises ValueError for a setting that cannot work, as far as the model and the data do not check it."""
    choices = {
        "init_from": ("scratch", "resume"),
        "optimizer": ("adamw", "muon"),
        "lr_decay": ("cosine", "linear", "none"),
        "compile": ("auto", "true", "false"),
    }
    for name, good in choices.items():
        if settings[name] not in good:
            raise ValueError(f"{name} = {settings[name]!r} does not work: it must be one of {', '.join(good)}")
    check_range(settings, "batch_size block_size grad_accum_steps max_iters", 1)
    check_range(settings, "eval_interval eval_tokens log_interval", 1)
    check_range(settings, "n_kv_head n_inner warmup_iters sample_tokens", 0)
    check_range(settings, "learning_rate min_lr_frac weight_decay grad_clip", 0)
    check_range(settings, "beta1 beta2", 0, 1)
    check_range(settings, "seed", 0, 2**63)
    if overwrite and init_from == "resume":
        raise ValueError("overwrite = True and init_from = 'resume' contradict each other: leave one out")


def prepare_data(folder):
    """Runs the dataset's prepare.py unless that has been done since its input.txt changed."""
    known = sorted(path.parent.name for path in folder.parent.glob("*/prepare.py"))
    if dataset not in known:
        raise ValueError(f"dataset = {dataset!r} does not work: it must be one of {', '.join(known)}")
    text, meta = folder / "input.txt", folder / "meta.json"
    if not meta.exists() or text.exists() and text.stat().st_mtime > meta.stat().st_mtime:
        why = "its input.txt is new" if meta.exists() else "it has not been prepared"
        print(f"data/{dataset}: {why}, running data/{dataset}/prepare.py", flush=True)
        if subprocess.run([sys.executable, folder / "prepare.py"]).returncode:
            sys.exit(2)


def check_resumable(saved):
    """Raises ValueError if this command would not go on with the run that the checkpoint is of."""
    for name, value in settings.items():
        before = saved["settings"].get(name)
        if name not in MAY_CHANGE and value != before:
            raise ValueError(f"{name} = {value!r}, but {latest} was trained with {before!r}: resume with that")
    if saved["data"] != data_facts:
        source = saved["data"]["source"]
        raise ValueError(f"data/{dataset} is not what {latest} was trained on: prepare {source} again")
    if saved["step"] >= max_iters:
        raise ValueError(f"max_iters = {max_iters}, but {latest} has come to step {saved['step']}: give more to go on")


with user_errors():
    check_settings()
    config_names = [Path(argument).stem for argument in sys.argv[1:] if not argument.startswith("-")]
    out = Path(out_dir or "out/" + ("-".join(config_names) or dataset))
    latest, best, log_file = out / "ckpt.pt", out / "best.pt", out / "log.jsonl"
    on = pick_device(device)
    precision = pick_dtype(dtype, on)

    data_folder = Path(__file__).resolve().parent / "data" / dataset
    prepare_data(data_folder)
    data = load(data_folder)
    data.check_block_size(block_size)
    data_facts = {name: data.meta[name] for name in ("source", "warning", "text_sha256")}

    shape = {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}
    shape |= {"vocab_size": data.meta["vocab_size"], "n_kv_head": n_kv_head or None, "n_inner": n_inner or None}
    config = GPTConfig(**shape)

    if init_from == "resume":
        saved = load_checkpoint(latest)
        check_resumable(saved)
        model = restore_model(saved, latest)
    elif (latest.exists() or best.exists()) and not overwrite:
        ways = "--init_from=resume goes on with it, --overwrite=true replaces it, --out_dir=FOLDER leaves it alone"
        raise ValueError(f"{out} already holds a run: {ways}")
    else:
        saved = None
        torch.manual_seed(seed)
        model = GPT(config)
    out.mkdir(parents=True, exist_ok=True)
    log = open(log_file, "a" if saved else "w", encoding="utf-8")

model.to(on).train()
if on.type == "cuda":
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
autocast = torch.autocast(on.type, precision) if precision != torch.float32 else nullcontext()
scaler = torch.amp.GradScaler(on.type, enabled=precision == torch.float16)

# -----------------------------------------------------------------------------
# the pieces of the loop


def make_optimizers():
    adamw = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), on.type)
    if optimizer == "adamw":
        return [adamw]
    hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
    for group in adamw.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not matrix for matrix in hidden)]
    # adjust_lr_fn gives Muon's updates the size of AdamW's, so one learning rate serves both
    return [torch.optim.Muon(hidden, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw"), adamw]


def learning_rate_at(step):
    """Warm-up, then decay to min_lr_frac of the learning rate at max_iters."""
    if step < warmup_iters:
        return learning_rate * (step + 1) / warmup_iters
    done = (step - warmup_iters) / max(max_iters - warmup_iters, 1)
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "none": 1}[lr_decay]
    return learning_rate * (min_lr_frac + (1 - min_lr_frac) * left)


@user_errors()
def batch(step, shard):
    """x and y of a micro-step, a pure function of (seed, step, shard)."""
    x, y = data.batch(seed, step, shard, batch_size, block_size)
    if on.type == "cuda":  # pinned memory travels while the GPU computes
        return x.pin_memory().to(on, non_blocking=True), y.pin_memory().to(on, non_blocking=True)
    return x.to(on), y.to(on)


def loss_of(x, y):
    with autocast:
        return model(x, y)[1]


def compile_model():
    """Compiles what all layers and replays have in common, once, and tries it; eager if that fails.

    Compiling the unrolled model as a whole would take minutes: Methods 1-4 have L(L-1)/2 replays.
    """
    for block in model.blocks:
        block.attention_branch = torch.compile(block.attention_branch)
        block.mlp_branch = torch.compile(block.mlp_branch)
        block.attn.project = torch.compile(block.attn.project)
        block.attn.score_vectors = torch.compile(block.attn.score_vectors)
    say("compiling ...")
    random = random_state()
    try:
        loss_of(*batch(0, 0)).backward()
    except Exception as error:  # a missing C++ compiler, an old GPU: whatever it is, eager works
        torch.compiler.set_stance("force_eager")
        say(f"not compiled, eager from here: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    model.zero_grad()
    restore_random(random)


@user_errors()
@torch.no_grad()
def evaluate(split):
    """Mean loss in nats per token over fixed windows: the same ones each time, and no random number drawn."""
    model.eval()
    total = tokens = 0
    for x, y in data.windows(split, batch_size, block_size, eval_tokens):
        counted = (y >= 0).sum().item()
        total = total + loss_of(x.to(on), y.to(on)) * counted
        tokens += counted
    model.train()
    return total.item() / tokens


def random_state():
    """What the next random numbers, those of dropout, depend on."""
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state(on)} if on.type == "cuda" else state


def restore_random(state):
    torch.set_rng_state(state["cpu"])
    if on.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], on)


def save(path):
    state = {
        "version": CHECKPOINT_VERSION,
        "config": asdict(config),
        "settings": settings,
        "data": data_facts,
        "tokenizer": data.tokenizer.state(),
        "step": step,
        "val_loss": val_loss,
        "best_loss": best_loss,
        "model": model.state_dict(),
        "optimizers": [opt.state_dict() for opt in optimizers],
        "scaler": scaler.state_dict(),
        "random": random_state(),
    }
    with replace_file(path) as file:
        torch.save(state, file)


sys.stdout.reconfigure(encoding="utf-8")
on_terminal = sys.stdout.isatty()


def say(line, lasting=True):
    """Prints a line; on a terminal, one that is not lasting makes room for the next."""
    if on_terminal:
        width = shutil.get_terminal_size().columns - 1
        print("\r\x1b[K" + (line if lasting else line[:width]), end="\n" if lasting else "", flush=True)
    else:
        print(line, flush=True)


def check_finite(loss):
    if not math.isfinite(loss):
        kept = f"{latest} is as it was" if latest.exists() else "nothing has been saved"
        say("")
        fail(f"the loss is {loss} at step {step}: a lower learning_rate than {learning_rate} may help; {kept}")


def stop(number, _):
    """On Ctrl-C or SIGTERM: finish the step, save and leave. A second signal ends the program at once."""
    global stop_signal
    stop_signal = number
    signal.signal(number, signal.SIG_DFL)


def note(event, **facts):
    """A line of log.jsonl."""
    print(json.dumps({"event": event, "step": step, **facts}), file=log, flush=True)


def clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


# -----------------------------------------------------------------------------
# what is about to happen

optimizers = make_optimizers()
step, val_loss, best_loss = 0, math.inf, math.inf
if saved:
    step, val_loss, best_loss = saved["step"], saved["val_loss"], saved["best_loss"]
    try:
        for opt, state in zip(optimizers, saved["optimizers"], strict=True):
            opt.load_state_dict(state)
        scaler.load_state_dict(saved["scaler"])
        restore_random(saved["random"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        fail(f"{latest}: damaged: its training state does not fit: {error}")

tokens_per_step = batch_size * grad_accum_steps * block_size
tokens, in_bytes = data.meta["tokens"], data.meta["bytes"]
method = f"{attention} attention" + {"w2": f" ({sigma} σ)", "summed_qk": f" ({qk_scale})"}.get(attention, "")
method += f", {residual} residual" + (" + input" if keep_input and residual != "standard" else "")
say(f"model   {method}: {n_layer} layers, width {n_embd}, {n_head} heads, {model.get_num_params():,} parameters")
counts = f"{tokens['train']:,} tokens to train on, {tokens['val']:,} to validate on"
say(f"data    {data.meta['source']} (data/{dataset}): {counts}")
if data.meta["warning"]:
    say(f"NOTE    {data.meta['warning']}")
epochs = max_iters * tokens_per_step / tokens["train"]
say(f"steps   {step:,} to {max_iters:,} of {tokens_per_step:,} tokens, {epochs:.3g} epochs in all, {optimizer}")
machine = torch.cuda.get_device_name(on) if on.type == "cuda" else f"{torch.get_num_threads()} threads"
say(f"device  {on} ({machine}), {str(precision).removeprefix('torch.')}; run in {out}")
note("start", settings=settings, config=asdict(config), parameters=model.get_num_params(), data=data.meta)

if compile == "true" or compile == "auto" and on.type == "cuda":
    compile_model()

# -----------------------------------------------------------------------------
# the loop

stop_signal = None
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
began = time.time()
first_step, seconds = step, 0.0  # seconds of training, without evaluating
last_step, last_time = step, began  # of the latest log line
while step < max_iters:
    rate = learning_rate_at(step)
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = rate

    loss_sum = 0
    for shard in range(grad_accum_steps):
        loss = loss_of(*batch(step, shard)) / grad_accum_steps
        scaler.scale(loss).backward()
        loss_sum = loss_sum + loss.detach()
    if grad_clip:
        for opt in optimizers:
            scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    for opt in optimizers:
        scaler.step(opt)
        opt.zero_grad()
    scaler.update()
    step += 1

    evaluating = step % eval_interval == 0 or step == max_iters
    if step % log_interval == 0 or evaluating:
        train_loss = loss_sum.item()  # waits for the GPU, so not at every step
        check_finite(train_loss)
        now = time.time()
        seconds += now - last_time
        speed = (step - last_step) * tokens_per_step / (now - last_time)
        left = (now - began) / (step - first_step) * (max_iters - step)
        mfu = model.estimate_mfu((step - last_step) * tokens_per_step / block_size, now - last_time)
        mfu = "n/a" if math.isnan(mfu) else f"{mfu:.1%}"
        at = f"step {step:,}/{max_iters:,}   loss {train_loss:.4f}"
        say(f"{at}   {speed:,.0f} tokens/s   MFU {mfu}   {clock(left)} left", lasting=False)
        note("step", loss=train_loss, learning_rate=rate, tokens_per_second=speed)
        last_step, last_time = step, now

    if evaluating:
        train_loss, val_loss = evaluate("train"), evaluate("val")
        check_finite(val_loss)
        perplexity = math.exp(min(val_loss, 700))
        bits_per_byte = val_loss / math.log(2) * tokens["val"] / in_bytes["val"]
        say(
            f"step {step:,}   train loss {train_loss:.4f}   validation loss {val_loss:.4f}   "
            f"perplexity {perplexity:.2f}   bits per byte {bits_per_byte:.3f}"
        )
        note("eval", train_loss=train_loss, val_loss=val_loss, perplexity=perplexity, bits_per_byte=bits_per_byte)
        if val_loss < best_loss:
            best_loss = val_loss
            save(best)
        save(latest)
        last_time = time.time()

    if stop_signal and step < max_iters:
        if not evaluating:
            save(latest)
        say(f"stopped after step {step}, saved in {latest}: the same command and --init_from=resume go on")
        sys.exit(128 + stop_signal)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
elapsed, speed = time.time() - began, (step - first_step) * tokens_per_step / seconds
note("end", seconds=elapsed, tokens_per_second=speed, best_loss=best_loss)
say(f"{clock(elapsed)} for {step - first_step:,} steps, {speed:,.0f} tokens/s while training")
if sample_tokens:
    say("-" * 80)
    tokenizer, generator = data.tokenizer, torch.Generator(on).manual_seed(seed)
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # each length of the context would be compiled anew
        write_text(model, tokenizer, first_tokens(tokenizer), sample_tokens, generator, temperature=0.8)
    say("-" * 80)
say(f"lowest validation loss {best_loss:.4f}: {best}; latest: {latest}")
say(f"more text: python sample.py --out_dir={shlex.quote(str(out))}")
