"""
Train a GPT: python train.py config/m1_shakespeare.py --max_iters=200

The settings are the plain variables below. Later config files override earlier ones, and --name=value overrides all.
A run that was stopped or killed resumes: --init_from=resume --out_dir=FOLDER. On several GPUs:
torchrun --standalone --nproc_per_node=8 train.py config/m1_shakespeare.py --grad_accum_steps=8
"""

# run
out_dir = ""  # folder of the run; empty: one in out/, named after the config files (or the dataset) and the options
init_from = "scratch"  # scratch, run:FOLDER (another run), resume (alone: the newest run), auto (resume if possible)
# data
dataset = "shakespeare_char"  # folder in data/, prepared when first used; with a slash: any folder
batch_size = 16  # sequences per forward pass
grad_accum_steps = 1  # forward passes per step, over all processes
block_size = 128  # context length, in tokens
# model
n_layer = 3  # layers
n_head = 4  # attention heads
n_kv_head = 0  # key/value heads, for grouped-query attention; 0: the same as n_head
n_embd = 128  # width
n_inner = 0  # width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64
dropout = 0.0  # dropout rate for the attention weights and the outputs of attention and MLP
bias = False  # biases in the linear layers
attention = "standard"  # standard, w2, summed_qk
qk_scale = "5.1"  # summed_qk: divisor of layer i's scores (d: width of a head; m: layers summed; a, b: learned)
#   5.1 √d   5.2 √d √m   5.3 √d m   5.4 d^a m^b   of the authors' Version 4: 5.5 a_i √d   5.6 a_i d^(b_i)   5.7 a_i
w2_score = "distance"  # w2: distance, overlap (what the W2 document states, and what its code computes)
sigma = "scalar"  # w2 by distance: scalar, diagonal, none (L2 attention)
residual = "standard"  # standard, m1, m2, m3.1, m3.2, m4.1, m4.2
keep_input = False  # m1 to m4.2: add the sum to the usual residual instead of replacing it
rope_theta = 10000.0  # base of RoPE's wavelengths
norm_eps = 1e-5  # epsilon of RMSNorm
tie_weights = False  # share one matrix between the embedding and the head
# optimizer: AdamW
max_iters = 800  # total steps
learning_rate = 3e-3  # peak rate
warmup_iters = 0  # warm-up steps; 0: an eighth of max_iters, but at most 100; 1: none
lr_decay = "cosine"  # cosine, linear, wsd (constant, then linear over the last fifth) or none; ends at max_iters
min_lr_frac = 0.1  # final rate as a fraction of the peak rate
weight_decay = 0.1  # for matrices
beta1 = 0.9
beta2 = 0.99  # 0.95 for large batches
grad_clip = 1.0  # maximum norm of the gradient; 0: no limit
# checkpoints and logs
checkpoint_interval = 200  # steps between checkpoints
eval_interval = 0  # steps between evaluations; 0: a quarter of max_iters, but at least 50
eval_tokens = 131072  # at most this many validation tokens per evaluation, and 1/16 as many training tokens
eval_only = False  # print the loss over the whole validation split and exit
log_interval = 10  # steps between log lines
# system
seed = 1337  # the same seed on the same machine gives the same run
device = "auto"  # auto, cpu, cuda, cuda:1, mps
dtype = "auto"  # auto, float32, bfloat16, float16
graphs = True  # on one GPU, run steps as CUDA graphs; false: if Python code in model.py changes from step to step
compile = "auto"  # auto: on CUDA, for long runs; true (on a CPU, pays off after ten minutes); false

from config import start_program

requested = start_program(__file__)  # the settings above and what overrides them; --help ends here, before PyTorch

import math
import time
from dataclasses import asdict
from datetime import timedelta

import torch
from torch.nn.parallel import DistributedDataParallel

from config.runtime import checkpoints, devices, processes, program, runs
from config.runtime.program import UserError, command, print0
from data.dataset import derive_seed, load_dataset
from data.prepare import ensure_prepared
from model import GPT

code = checkpoints.code_version()  # before anyone edits what has just been imported
settings, ckpt, resuming = runs.begin(requested)  # ckpt: the checkpoint that the run goes on from, if any
globals().update(settings)  # the names above now hold this run's values

# device and data; ptdevice and ptdtype are PyTorch's, of the settings device and dtype
ptdevice, rank, world_size = devices.pick_device(device), processes.rank(), processes.world_size()
processes.join(ptdevice)
machine = devices.machine_name(ptdevice)
ptdtype = devices.pick_dtype(dtype, ptdevice)
dtype = settings["dtype"] = str(ptdtype).removeprefix("torch.")  # instead of auto: a resumed run must keep it
cuda = ptdevice.type == "cuda"
# without autocast's cache, since CUDA graphs need each cast of a weight
ctx = torch.autocast(ptdevice.type, ptdtype, enabled=ptdtype != torch.float32, cache_enabled=not cuda)
if cuda:
    torch.cuda.set_device(ptdevice)
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32

data = load_dataset(ensure_prepared(dataset))
if not eval_only:
    data.check_block_size(block_size)
if ckpt:
    runs.check_data(data, ckpt, same_text=resuming and not eval_only)
tokens = data.meta["tokens"]  # of each split
tokens_per_iter = batch_size * grad_accum_steps * block_size

# model
torch.manual_seed(seed)
iter_num, val_loss, best_val_loss = 0, math.inf, math.inf
notes = runs.replaced_settings(requested.files) + runs.ineffective_settings(settings, requested.given)
if resuming:
    raw_model = checkpoints.build_model(ckpt)
    notes += runs.resume_notes(ckpt, settings, machine, code)
    iter_num, val_loss, best_val_loss = ckpt["iter_num"], ckpt["val_loss"], ckpt["best_val_loss"]
elif ckpt:
    raw_model, new_weights = checkpoints.begin_from(ckpt, settings)
    notes += new_weights
else:
    vocab_size = data.meta["vocab_size"]
    if vocab_size > 10_000:  # GPT-2's 50,257 would misalign a GPU's products: 50,304 is a multiple of 64
        vocab_size += -vocab_size % 64
    raw_model = GPT(checkpoints.make_config(settings, vocab_size=vocab_size))
raw_model.to(ptdevice)
devices.pick_attention_kernel(raw_model, ptdevice, ptdtype)
model = DistributedDataParallel(raw_model, gradient_as_bucket_view=True) if world_size > 1 else raw_model

# optimizer
optimizer = raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), ptdevice.type)
scaler = torch.amp.GradScaler(ptdevice.type, enabled=ptdtype == torch.float16)
if resuming and not eval_only:
    optimizer.load_state_dict(ckpt["optimizer"])
    scaler.load_state_dict(ckpt["scaler"])
ckpt = None  # frees its memory


def get_batch(iter_num, micro_step):
    """Return x and y, (B, T): a pure function of the seed, the step and the micro-step."""
    x, y = data.batch(seed, iter_num, micro_step, batch_size, block_size, shards=grad_accum_steps)
    if cuda:  # pinned memory is copied while the GPU computes
        x, y = x.pin_memory(), y.pin_memory()
    return x.to(ptdevice, non_blocking=cuda), y.to(ptdevice, non_blocking=cuda)


def get_lr(iter_num):
    """Return the learning rate: linear warm-up, then decay to min_lr_frac of the peak rate at max_iters."""
    if iter_num < warmup_iters:
        return learning_rate * (iter_num + 1) / warmup_iters
    ratio = (iter_num - warmup_iters) / max(max_iters - warmup_iters, 1)
    cosine, linear = (1 + math.cos(math.pi * ratio)) / 2, 1 - ratio
    coeff = {"cosine": cosine, "linear": linear, "wsd": min(1, 5 * linear), "none": 1}[lr_decay]
    return learning_rate * (min_lr_frac + (1 - min_lr_frac) * coeff)


@torch.no_grad()
def estimate_loss(split, max_tokens):
    """Return the mean loss in nats per token. The windows are always the same, and no random number is drawn."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # the total loss and the number of tokens
    for x, y in data.windows(split, batch_size, block_size, max_tokens, rank, world_size):
        count = (y >= 0).sum().item()
        with ctx:
            loss = model(x.to(ptdevice), y.to(ptdevice))[1]
        if count:  # a batch may have none, to keep the processes in step
            sums += torch.tensor([loss.item() * count, count])
    model.train()
    total, count = processes.all_reduce(sums).tolist()
    return total / count


def other_units(val_loss):
    """Return the perplexity, and the bits per byte of text, which are comparable across tokenizers."""
    return math.exp(min(val_loss, 700)), val_loss / math.log(2) * tokens["val"] / data.meta["bytes"]["val"]


# -----------------------------------------------------------------------------
# summary of the run
parameters, flops_per_token = raw_model.get_num_params(), devices.count_flops(raw_model)
size = f"{n_layer} layers, width {n_embd}, {n_head} heads, {parameters:,} parameters"
counts = f"{tokens['train']:,} training tokens, {tokens['val']:,} validation tokens"
epochs = max_iters * tokens_per_iter / tokens["train"]
origin = f"step {iter_num:,} of {out_dir}" if resuming else init_from
kept = ", input kept" if keep_input else ""
print0(f"model   {attention} attention, {residual} residual{kept}: {size}, from {origin}")
print0(f"data    {data.meta['source']} ({dataset}): {counts}")
if not eval_only:
    print0(f"steps   {iter_num:,} to {max_iters:,} with {tokens_per_iter:,} tokens each, {epochs:.3g} epochs")
print0(f"device  {machine}, {dtype}; run in {out_dir}")
for note in notes:
    print0(f"NOTE    {note}")

if eval_only:
    val_loss = estimate_loss("val", max_tokens=tokens["val"])
    perplexity, bits_per_byte = other_units(val_loss)
    print0(
        f"validation loss {val_loss:.4f}   perplexity {perplexity:.2f}   bits per byte {bits_per_byte:.3f}   "
        f"over all {tokens['val']:,} tokens"
    )
    program.exit_together()

operations = flops_per_token * tokens_per_iter * (max_iters - iter_num)
settings["compile"] = devices.compile_model(raw_model, compile, ptdevice, operations)
processes.barrier()  # all processes have read the folder's old state, so the first may now write to it
run = runs.Run(settings, iter_num)
about = {"settings": settings, "config": asdict(raw_model.config), "data": data.meta, "machine": machine, "code": code}
counted = {"parameters": parameters, "flops_per_token": flops_per_token}
run.log("resume" if resuming else "start", iter_num, **about, **counted, notes=notes)
loss_of, graphed = devices.capture(model, *get_batch(iter_num, rank), ctx, graphs)  # the model's loss of a batch

# -----------------------------------------------------------------------------
# training

steps_per_eval = eval_interval or max(50, math.ceil(max_iters / 4))
micro_steps = range(rank, grad_accum_steps, world_size)  # this process's share of each step
stop = program.StopSignal()  # Ctrl-C, SIGTERM, SIGUSR1 and the like: finish the step, save and exit
stopped_by = 0  # the signal's number
logged_iter = iter_num  # step of the latest log line
local_iter_num = 0  # steps of this process
train_seconds = 0.0  # of this process, excluding evaluation and saving
began = t0 = time.perf_counter()


def log_step(loss, grad_norm, lr, iters, seconds):
    """Print and log a step. Its speed and MFU are those of the `iters` steps since the previous line, in `seconds`."""
    speed = iters * tokens_per_iter / seconds
    mfu = flops_per_token * speed / world_size / devices.peak_flops(ptdevice)
    mfu = "" if math.isnan(mfu) else f"   MFU {mfu:.1%}"
    seconds_left = (time.perf_counter() - began) / local_iter_num * (max_iters - iter_num)
    print0(
        f"step {iter_num:,}/{max_iters:,}   loss {loss:.4f}   gradient norm {grad_norm:.3f}   lr {lr:.2e}   "
        f"{speed:,.0f} tokens/s{mfu}   {timedelta(seconds=round(seconds_left))} left"
    )
    run.log("step", iter_num, loss=loss, grad_norm=grad_norm, learning_rate=lr, tokens_per_second=speed)


def save(name):
    state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    progress = {"iter_num": iter_num, "val_loss": val_loss, "best_val_loss": best_val_loss}
    run.save(name, about | state | progress | {"tokenizer": data.tokenizer.state()})


def end_diverged(what):
    run.log("diverged", iter_num)
    likely = f"learning_rate = {learning_rate}, weight_decay = {weight_decay} or dtype = {dtype}"
    raise UserError(f"{what} at step {iter_num}: the run has diverged, most likely because of {likely}")


while iter_num < max_iters and not stopped_by:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr

    # forward and backward
    loss = 0.0
    for micro_step in micro_steps:
        if world_size > 1:  # synchronize gradients only at the last micro-step
            model.require_backward_grad_sync = micro_step == micro_steps[-1]
        torch.manual_seed(derive_seed(seed, iter_num, micro_step))  # so resuming is exact with dropout too
        x, y = get_batch(iter_num, micro_step)
        with ctx:
            micro_loss = loss_of(x, y) / len(micro_steps)
        scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()

    # update
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)  # it skips steps that overflow float16, until its scale fits
    scaler.update()
    optimizer.zero_grad(set_to_none=not graphed)
    iter_num += 1
    local_iter_num += 1

    stopped_by = processes.all_reduce(torch.tensor(stop.number), "MAX").item()  # on the CPU: no wait for the GPU
    evaluating = iter_num % steps_per_eval == 0 or iter_num == max_iters
    saving = iter_num % checkpoint_interval == 0 or iter_num == max_iters or stopped_by
    if not (evaluating or saving or iter_num % log_interval == 0):
        continue  # most steps end here

    # log, evaluate, save
    lossf = (processes.all_reduce(loss) / world_size).item()  # only here, because it waits for the GPU
    norm = grad_norm.item()
    rescaling = scaler.is_enabled() and scaler.get_scale() > 1  # an overflow only lowers the scale of the next step
    if not math.isfinite(lossf) or (not math.isfinite(norm) and not rescaling):
        end_diverged(f"the loss is {lossf}, the norm of its gradient {norm}")
    dt = time.perf_counter() - t0
    train_seconds += dt
    log_step(lossf, norm, lr, iter_num - logged_iter, dt)
    logged_iter = iter_num

    if evaluating:
        train_loss, val_loss = estimate_loss("train", max(1, eval_tokens // 16)), estimate_loss("val", eval_tokens)
        if not math.isfinite(val_loss):
            end_diverged(f"the validation loss is {val_loss}")
        perplexity, bits_per_byte = other_units(val_loss)
        print0(
            f"step {iter_num:,}   train loss {train_loss:.4f}   validation loss {val_loss:.4f}   "
            f"perplexity {perplexity:.2f}   bits per byte {bits_per_byte:.3f}"
        )
        losses = {"train_loss": train_loss, "val_loss": val_loss}
        run.log("eval", iter_num, **losses, perplexity=perplexity, bits_per_byte=bits_per_byte)
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            save("best.pt")
    if saving:
        save("ckpt.pt")
    t0 = time.perf_counter()

# -----------------------------------------------------------------------------

if iter_num < max_iters:
    print0(f"stopped after step {iter_num:,}, saved in {out_dir}/ckpt.pt; to resume: {run.resume_command(max_iters)}")
    program.exit_together(128 + stopped_by)
seconds, speed = time.perf_counter() - began, local_iter_num * tokens_per_iter / train_seconds
run.log("end", iter_num, seconds=seconds, tokens_per_second=speed, best_loss=best_val_loss)
print0(f"{timedelta(seconds=round(seconds))} for {local_iter_num:,} steps, {speed:,.0f} tokens/s while training")
print0(f"lowest validation loss {best_val_loss:.4f}: {out_dir}/best.pt; latest: {out_dir}/ckpt.pt")
print0(f"to train longer: {run.resume_command(2 * max_iters)}")
print0(f"to sample from it: {command('sample.py', f'--out_dir={out_dir}')}")
program.exit_together()
