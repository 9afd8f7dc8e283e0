"""
Train a GPT: python train.py config/m1_shakespeare.py --max_iters=200

Settings are the plain variables below, changed by any number of config files and then by --name=value; --help lists
them. A run that was stopped or killed goes on as if nothing had happened: --init_from=resume --out_dir=FOLDER. On
several GPUs: torchrun --standalone --nproc_per_node=8 train.py config/m1_shakespeare.py --grad_accum_steps=8
"""

import math
import os
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from config import given_settings, read_settings
from config.runtime.checkpoint import begin_from_llama, begin_from_run, begin_from_scratch, check_folder
from config.runtime.checkpoint import find_checkpoint, load_checkpoint, reopen, restore_optimizers, resume_notes
from config.runtime.checkpoint import resumed_model, save_checkpoint
from config.runtime.checks import check_settings, ineffective_settings
from config.runtime.common import StopSignal, UserError, clock, exit_program, install_excepthook, machine_name
from config.runtime.common import peak_flops, pick_attention_kernel, pick_compile, pick_device, pick_dtype
from config.runtime.common import print0, resource_errors
from config.runtime.distributed import compile_or_eager, dist_max, dist_sum, full_tensor, init_distributed
from config.runtime.distributed import parallelize_model
from config.runtime.metrics import MetricLogger, code_version
from data.dataset import derive_seed, load_dataset
from data.preprocess import ensure_prepared

install_excepthook()  # users' mistakes end in one line and exit code 2

# -----------------------------------------------------------------------------
# run
out_dir = ""  # folder of the run; empty: out/ and the names of the config files
init_from = "scratch"  # scratch, hf:NAME (a Llama), run:FOLDER (another run), resume, or auto: resume or scratch
overwrite = False  # replace the run that the folder already holds
seed = 1337  # same seed and machine, same run
# data
dataset = "shakespeare_char"  # folder in data/; prepared at first use
batch_size = 16  # sequences per forward pass
grad_accum_steps = 1  # forward passes per step, of all processes together
block_size = 128  # tokens per sequence
# model
n_layer = 3  # blocks
n_head = 4  # attention heads
n_kv_head = 0  # key/value heads, for grouped-query attention; 0: as many as n_head
n_embd = 128  # width
n_inner = 0  # width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64
dropout = 0.0  # share of activations dropped, in attention and residual branches
bias = False  # biases in the linear layers
attention = "standard"  # standard, w2, summed_qk, cosine
qk_scale = "5.1"  # of summed_qk: what divides the QKᵀ of layer i, d its width, m the layers so far, a and b learned:
#   5.1 √d   5.2 √d √m   5.3 √d m   5.4 d^a m^b   5.5 a_i √d   5.6 a_i d^b_i   5.7 a_i
sigma = "scalar"  # of w2: scalar, diagonal, none (L2 attention)
value_residual = False  # mix the first layer's values into every layer's
residual = "standard"  # standard, m1, m2, m3.1, m3.2, m4.1, m4.2
keep_input = False  # m1 to m4: add the sum to the residual instead of replacing it
connection = "latest"  # what a layer reads: latest, x0, dense, attnres
rope_theta = 10000.0  # base of RoPE's wavelengths
norm_eps = 1e-5  # of RMSNorm
tie_weights = False  # one matrix for embedding and head
activation_checkpointing = False  # less memory: the backward pass runs every block once more
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
# keeping and watching
checkpoint_interval = 200  # steps between checkpoints
eval_interval = 0  # steps between evaluations; 0: a tenth of max_iters
eval_tokens = 131072  # tokens evaluated in the validation split, at most; in the training split a quarter of it
eval_only = False  # print the loss over the whole validation split, and write nothing
log_interval = 10  # steps between log lines
tensorboard = False  # what goes to log.jsonl goes to TensorBoard too, in the run's folder
wandb = False  # and to Weights & Biases, under the name of the run's folder
# system
device = "auto"  # auto, cpu, cuda, cuda:1, mps
dtype = "auto"  # auto, float32, bfloat16, float16
compile = "auto"  # auto: on a GPU, and on a CPU if the run takes ten minutes; true, false
parallel = "ddp"  # under torchrun: ddp, or fsdp: the parameters too are spread over the processes

defaults = read_settings(__file__, [])  # the above
given = given_settings(__file__)  # by config files, then by --name=value
settings = defaults | given
globals().update(settings)
# -----------------------------------------------------------------------------

# the folder, and the settings, which a run that goes on has already
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun says so
config_names = [Path(argument).stem for argument in sys.argv[1:] if not argument.startswith("-")]
out = Path(out_dir or "out/" + ("-".join(config_names) or dataset))
latest, best = out / "ckpt.pt", out / "best.pt"
resuming = init_from == "resume" or init_from == "auto" and find_checkpoint(out).exists()
if resuming:
    path, checkpoint, settings = reopen(out, given, defaults)
    globals().update(settings)
elif init_from == "auto":
    settings["init_from"] = init_from = "scratch"
check_settings(settings, world_size)
if not resuming:
    check_folder(out, settings)

# the device and the data
device = init_distributed(pick_device(device))
machine = machine_name(device, world_size)
ptdtype = pick_dtype(dtype, device)
settings["dtype"] = str(ptdtype).removeprefix("torch.")  # what auto has come to: a resumed run must keep it
ctx = torch.autocast(device.type, ptdtype) if ptdtype != torch.float32 else nullcontext()
if device.type == "cuda":
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32

data = load_dataset(ensure_prepared(dataset))
if not eval_only:
    data.check_block_size(block_size)
tokens, tokens_per_iter = data.meta["tokens"], batch_size * grad_accum_steps * block_size
eval_interval = eval_interval or math.ceil(max_iters / 10)

# the model
torch.manual_seed(seed)
iter_num, val_loss, best_val_loss = 0, math.inf, math.inf
if resuming:
    raw_model = resumed_model(checkpoint, path, settings, data)
    iter_num, val_loss = checkpoint["iter_num"], checkpoint["val_loss"]
    best_val_loss = load_checkpoint(best)["val_loss"] if best.exists() else math.inf  # may be newer than ckpt.pt
elif init_from.startswith("hf:"):
    raw_model = begin_from_llama(settings, data)
elif init_from.startswith("run:"):
    raw_model = begin_from_run(settings, given, data)
else:
    raw_model = begin_from_scratch(settings, data)
config = raw_model.config
notes = ineffective_settings(settings, given, defaults)
if resuming and not eval_only:
    notes += resume_notes(checkpoint, settings, machine)

if compile == "auto":
    compile = str(pick_compile(device, raw_model.flops_per_token() * max_iters * tokens_per_iter)).lower()
settings["compile"] = compile
model = parallelize_model(raw_model, parallel, device, ptdtype)
pick_attention_kernel(raw_model, device, ptdtype)

# the optimizers
optimizers = [raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device.type)]
if optimizer == "muon":  # for the first group, the blocks' matrices; AdamW keeps the rest
    matrices = optimizers[0].param_groups.pop(0)["params"]
    # adjust_lr_fn gives Muon's updates the size of AdamW's, so one learning rate serves both
    optimizers.insert(0, torch.optim.Muon(matrices, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw"))
scaler = torch.amp.GradScaler(device.type, enabled=ptdtype == torch.float16)
if resuming and not eval_only:
    restore_optimizers(checkpoint, raw_model, optimizers, scaler)
checkpoint = None  # its memory

# -----------------------------------------------------------------------------


def get_batch(iter_num, micro_step):
    """Return x and y, (B, T): a pure function of the seed, the step and the micro-step, whatever was drawn before."""
    x, y = data.batch(seed, iter_num, micro_step, batch_size, block_size, grad_accum_steps)
    if device.type == "cuda":  # pinned memory travels while the GPU computes
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


def get_lr(iter_num):
    """Return the learning rate: it warms up, then decays to min_lr_frac of its highest value at max_iters."""
    if iter_num < warmup_iters:
        return learning_rate * (iter_num + 1) / warmup_iters
    done = (iter_num - warmup_iters) / max(max_iters - warmup_iters, 1)
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "none": 1}[lr_decay]
    return learning_rate * (min_lr_frac + (1 - min_lr_frac) * left)


@torch.no_grad()
def estimate_loss(split, max_tokens):
    """Return the mean loss in nats per token over fixed windows, the same each time. No random number is drawn."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # of losses, and of the tokens they are about
    for x, y in data.windows(split, batch_size, config.block_size, max_tokens, rank, world_size):
        counted = (y >= 0).sum().item()
        with ctx:
            loss = model(x.to(device), y.to(device))[1]
        if counted:
            sums += torch.tensor([loss.item() * counted, counted])
    model.train()
    total, tokens = dist_sum(sums).tolist()
    return total / tokens


def describe_loss(val_loss):
    """Return perplexity, and bits per byte, which compares over tokenizers."""
    bits_per_byte = val_loss / math.log(2) * data.meta["tokens"]["val"] / data.meta["bytes"]["val"]
    return {"perplexity": math.exp(min(val_loss, 700)), "bits_per_byte": bits_per_byte}


def save(path):
    """Write a checkpoint. Return False if there is no room for it; then the one before stays whole."""
    facts = {"iter_num": iter_num, "val_loss": val_loss, "settings": settings, "config": asdict(config)}
    facts["data"] = {"source": data.meta["source"], "sha256": data.meta["sha256"]}
    facts |= {"tokenizer": data.tokenizer.state(), "machine": machine}
    return save_checkpoint(path, raw_model, optimizers, scaler, **facts)


def give_up(why):
    """End a run that has gone wrong, and leave its checkpoints as they are."""
    raise UserError(f"{why}; {f'{out} holds step {saved_iter}' if saved_iter else 'nothing has been saved'}")


def end_diverged(what):
    """End a run whose numbers are no longer finite."""
    logger.log("diverged", iter_num)
    give_up(f"{what} at step {iter_num}: a lower learning_rate than {learning_rate} may help")


# -----------------------------------------------------------------------------
# what is about to happen
kind = {"w2": f" ({config.sigma} σ)", "summed_qk": f" ({config.qk_scale})"}.get(config.attention, "")
kept = " + input" if config.keep_input and config.residual != "standard" else ""
compiled = ", compiled" if compile == "true" else ""
parameters = raw_model.get_num_params()
size = f"{config.n_layer} layers, width {config.n_embd}, {config.n_head} heads, {parameters:,} parameters"
counts = f"{tokens['train']:,} tokens to train on, {tokens['val']:,} to validate on"
epochs = max_iters * tokens_per_iter / tokens["train"]
print0(f"model   {config.attention}{kind} attention, {config.residual}{kept} residual: {size}, from {init_from}")
print0(f"data    {data.meta['source']} (data/{dataset}): {counts}")
print0(f"steps   {iter_num:,} to {max_iters:,} of {tokens_per_iter:,} tokens, {epochs:.3g} epochs in all, {optimizer}")
print0(f"device  {machine}, {settings['dtype']}{compiled}; run in {out}")
for note in notes:
    print0(f"NOTE    {note}")

if eval_only:
    val_loss = estimate_loss("val", max_tokens=tokens["val"])
    numbers = describe_loss(val_loss)
    print0(
        f"validation loss {val_loss:.4f}   perplexity {numbers['perplexity']:.2f}   "
        f"bits per byte {numbers['bits_per_byte']:.3f}   over all {tokens['val']:,} tokens"
    )
    exit_program()

if compile == "true":
    compile_or_eager(raw_model, device, ctx)

if world_size > 1:
    dist.barrier()  # from here on the first process writes to the folder, which the others have now seen as it was
logger = MetricLogger(out, iter_num, settings)
if rank == 0 and not resuming:  # the run that was here goes, now that nothing is left that could be refused
    latest.unlink(missing_ok=True)
    best.unlink(missing_ok=True)
facts = {"settings": settings, "config": asdict(config), "data": data.meta, "machine": machine, "notes": notes}
facts |= {"parameters": parameters, "flops_per_token": raw_model.flops_per_token(), "code": code_version()}
logger.log("resume" if iter_num else "start", iter_num, **facts)

# -----------------------------------------------------------------------------
# the loop

stop = StopSignal()  # Ctrl-C, SIGTERM, SIGHUP: finish the step, save and leave
stopped_by = 0
saved_iter = iter_num  # of the newest checkpoint
first_iter = iter_num  # of this process
last_iter = iter_num  # of the latest log line
micro_steps = range(rank, grad_accum_steps, world_size)  # of each step, those of this process
began = last_time = time.time()
train_seconds = 0.0  # without evaluating and saving
with resource_errors():  # too little memory, and the end of another process, are told in a line
    while iter_num < max_iters and not stopped_by:
        lr = get_lr(iter_num)
        for opt in optimizers:
            for group in opt.param_groups:
                group["lr"] = lr

        # forward and backward
        loss = 0.0
        for micro_step in micro_steps:
            if world_size > 1 and parallel == "ddp":  # gradients are summed over the processes at the last one only
                model.require_backward_grad_sync = micro_step == micro_steps[-1]
            torch.manual_seed(derive_seed(seed, iter_num, micro_step))  # what dropout drops is as pure as the batch
            x, y = get_batch(iter_num, micro_step)
            with ctx:
                micro_loss = model(x, y)[1] / len(micro_steps)
            scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()

        # the step
        for opt in optimizers:
            scaler.unscale_(opt)
        grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
        # float16 overflows until the scaler has found its scale: then no optimizer takes the step, not one of two
        overflow = scaler.is_enabled() and not full_tensor(grad_norm).isfinite()
        for opt in optimizers:
            if not overflow:
                scaler.step(opt)
            opt.zero_grad()
        scaler.update()
        iter_num += 1

        stopped_by = dist_max(stop.number)
        ending = stopped_by or iter_num == max_iters
        evaluating = iter_num % eval_interval == 0 or iter_num == max_iters
        logging = iter_num % log_interval == 0 or evaluating
        saving = iter_num % checkpoint_interval == 0 or ending

        if logging or saving:  # only here, since a GPU must be waited for
            lossf, norm = (dist_sum(loss) / world_size).item(), full_tensor(grad_norm).item()
            if not math.isfinite(lossf) or not math.isfinite(norm) and not (overflow and scaler.get_scale() > 1):
                end_diverged(f"the loss is {lossf}, the norm of its gradient {norm}")

        if logging:
            now, iters = time.time(), iter_num - last_iter
            speed = iters * tokens_per_iter / (now - last_time)
            sequences = iters * batch_size * grad_accum_steps / world_size
            mfu = raw_model.estimate_mfu(sequences, now - last_time, peak_flops(device))
            left = clock((now - began) / (iter_num - first_iter) * (max_iters - iter_num))
            print0(
                f"step {iter_num:,}/{max_iters:,}   loss {lossf:.4f}   gradient norm {norm:.3f}   lr {lr:.2e}   "
                f"{speed:,.0f} tokens/s   MFU {'n/a' if math.isnan(mfu) else f'{mfu:.1%}'}   {left} left"
            )
            numbers = {"loss": lossf, "grad_norm": norm if math.isfinite(norm) else None, "learning_rate": lr}
            logger.log("step", iter_num, **numbers, tokens_per_second=speed)
            train_seconds += now - last_time
            last_iter, last_time = iter_num, now

        paused = time.time()
        if evaluating:
            train_loss, val_loss = estimate_loss("train", max(1, eval_tokens // 4)), estimate_loss("val", eval_tokens)
            if not math.isfinite(val_loss):
                end_diverged(f"the validation loss is {val_loss}")
            numbers = describe_loss(val_loss)
            print0(
                f"step {iter_num:,}   train loss {train_loss:.4f}   validation loss {val_loss:.4f}   "
                f"perplexity {numbers['perplexity']:.2f}   bits per byte {numbers['bits_per_byte']:.3f}"
            )
            logger.log("eval", iter_num, train_loss=train_loss, val_loss=val_loss, **numbers)
            if val_loss < best_val_loss and save(best):
                best_val_loss = val_loss
                saved_iter = saved_iter or iter_num  # best.pt serves until there is a ckpt.pt
        if saving and save(latest):
            saved_iter = iter_num
        last_time += time.time() - paused

# -----------------------------------------------------------------------------

if world_size > 1:
    dist.barrier()  # processes leave together
launcher = "torchrun ..." if world_size > 1 else "python"
go_on = f"{launcher} {shlex.quote(sys.argv[0])} --init_from=resume --out_dir={shlex.quote(str(out))}"
if saved_iter < iter_num:
    give_up(f"step {iter_num} could not be saved: make room, then {go_on if saved_iter else 'start again'}")
if iter_num < max_iters:
    print0(f"stopped after step {iter_num:,}, saved in {latest}; to go on: {go_on}")
    exit_program(128 + stopped_by)
seconds, speed = time.time() - began, (last_iter - first_iter) * tokens_per_iter / train_seconds
logger.log("end", iter_num, seconds=seconds, tokens_per_second=speed, best_loss=best_val_loss)
print0(f"{clock(seconds)} for {iter_num - first_iter:,} steps, {speed:,.0f} tokens/s while training")
print0(f"lowest validation loss {best_val_loss:.4f}: {best}; latest: {latest}")
print0(f"to go on: {go_on} --max_iters={2 * max_iters}")
print0(f"to read what it writes: python sample.py --out_dir={shlex.quote(str(out))}")
exit_program()
