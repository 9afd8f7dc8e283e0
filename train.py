"""
Train a GPT: python train.py config/m1_shakespeare.py --max_iters=200

The settings are the plain variables below. Later config files override earlier ones, and --name=value overrides all.
A run that was stopped or killed resumes: --init_from=resume --out_dir=FOLDER. On several GPUs:
torchrun --standalone --nproc_per_node=8 train.py config/m1_shakespeare.py --gradient_accumulation_steps=8
"""

# run
out_dir = ""  # folder of the run; empty: one in out/, named after the config files (or the dataset) and the options
init_from = "scratch"  # scratch, run:FOLDER (another run), resume (alone: the newest run), auto (resume if possible)
# data
dataset = "shakespeare_char"  # folder in data/, prepared when first used; with a slash: any folder
batch_size = 16  # sequences per forward pass
gradient_accumulation_steps = 1  # forward passes per step, over all processes
block_size = 128  # context length, in tokens
# model
n_layer = 3  # layers
n_head = 4  # attention heads
n_kv_head = 0  # key/value heads, for grouped-query attention; 0: the same as n_head
n_embd = 128  # width
n_inner = 0  # width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64
dropout = 0.0  # dropout rate for the attention weights and the outputs of attention and MLP
bias = False  # biases in the linear layers
attention = "standard"  # standard, w2, w2_overlap (what W2Attn's code computes), summed_qk
qk_scale = "5.1"  # summed_qk: divisor of layer i's scores (d: width of a head; m: layers summed; a, b: learned)
#   5.1 √d   5.2 √d √m   5.3 √d m   5.4 d^a m^b   5.5 a_i √d   5.6 a_i d^(b_i)   5.7 a_i
sigma = "scalar"  # w2: scalar, diagonal, none (L2 attention)
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
compile = False  # compile the model: pays on a GPU for long runs, on a CPU for those over ten minutes

from config import UserError, check_min, configure, print0, report_error

settings, given, config_files, options = configure(__file__)  # --help ends here, before PyTorch is imported

import atexit
import json
import math
import os
import re
import sys
import time
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from config import atomic_write, runtime
from data.dataset import derive_seed, load_dataset
from data.prepare import ensure_prepared
from model import GPT, ConfigError, GPTConfig

# -- the run: its folder, and what it begins from
MODEL = {field.name for field in fields(GPTConfig)} & settings.keys()  # settings of the model
# settings that a run shares with the one whose weights it starts from
SIZE = MODEL - {"block_size", "dropout", "attention", "qk_scale", "sigma", "residual", "keep_input"}
MAY_CHANGE = {"out_dir", "init_from", "eval_only", "max_iters", "device", "graphs", "compile"}  # when a run resumes
MAY_CHANGE |= {"checkpoint_interval", "eval_interval", "log_interval"}
CHOOSE = {"dtype": "auto", "warmup_iters": 0}  # let a new run choose; a resumed one keeps its choice
globals().update(settings)  # the names above now hold what was given
source = init_from.removeprefix("run:") if init_from.startswith("run:") else ""  # another run, which has the weights
if eval_only and not source:
    init_from = "resume"
if not source and init_from not in ("scratch", "resume", "auto"):
    raise UserError(f"init_from = {init_from!r} is invalid: choose scratch, resume, auto or run:FOLDER")

naming = options.keys() - MAY_CHANGE
if not out_dir and init_from == "resume" and not config_files and not naming:
    out_dir = runtime.newest_run()
if not out_dir:  # what was typed, in the order of the settings
    words = [Path(file).stem for file in config_files]
    words += [Path(dataset).name] if "dataset" in naming or not words else []
    words += [f"from={source.removeprefix('out/')}"] if source else []
    words += [f"{name}={settings[name]}" for name in settings if name in naming - {"dataset"}]
    out_dir = "out/" + re.sub(r"[^\w.=+-]+", "_", "-".join(words)).replace("=True", "")

log_path = Path(out_dir, "log.jsonl")
checkpoints = runtime.find_checkpoints(out_dir)
evaluated = log_path.exists() and b'"event": "eval"' in log_path.read_bytes()  # so there was a checkpoint
resuming = init_from == "resume" or init_from == "auto" and bool(checkpoints)
replacing = options.get("init_from") == "scratch"  # typed, and not only the default
if (checkpoints or evaluated) and not (resuming or replacing or eval_only):
    cure = f"continue it with --init_from=resume --out_dir={out_dir}, or " if checkpoints else ""
    cure += "choose another folder with --out_dir"
    cure += "" if source else ", or replace it with --init_from=scratch"
    raise UserError(f"{out_dir} already holds a run: {cure}")

ckpt = None
if resuming or source:
    ckpt = runtime.load_checkpoint(source or out_dir, best=eval_only or bool(source))
    was = ckpt["settings"]  # settings added since then are not in it
    if resuming:
        inherited = settings.keys()
        fixed = inherited - MAY_CHANGE - {"dataset"}  # a folder that may have moved: its text is compared below
        fixed -= {"batch_size", "dtype"} if eval_only else set()
    else:
        inherited, fixed = MODEL, SIZE & was.keys()
    changed = {name: value for name, value in given.items() if value not in (was.get(name), CHOOSE.get(name))}
    wrong = [f"{name} = {value!r} (was {was.get(name)!r})" for name, value in changed.items() if name in fixed]
    if wrong:
        raise UserError(f"{ckpt['path']} was trained with other settings: leave out {', '.join(wrong)}")
    settings |= {name: was[name] for name in inherited & was.keys() - changed.keys()}

settings |= {"out_dir": out_dir, "init_from": init_from}
settings["warmup_iters"] = settings["warmup_iters"] or min(100, math.ceil(settings["max_iters"] / 8))
globals().update(settings)  # the names above now hold this run's values

check_min(settings, "batch_size gradient_accumulation_steps max_iters checkpoint_interval eval_tokens log_interval", 1)
check_min(settings, "seed eval_interval warmup_iters learning_rate min_lr_frac weight_decay grad_clip beta1 beta2", 0)
if lr_decay not in ("cosine", "linear", "wsd", "none"):
    raise UserError(f"lr_decay = {lr_decay!r} is invalid: choose cosine, linear, wsd or none")
try:
    config = GPTConfig(**{name: settings[name] for name in MODEL})
except ConfigError as error:
    raise UserError(error) from None

iter_num, best_val_loss = 0, math.inf
if resuming and not eval_only:
    iter_num = ckpt["iter_num"]
    # best.pt may be of the evaluation after ckpt.pt, and must not be replaced by a worse one
    best_val_loss = runtime.load_checkpoint(out_dir, best=True)["best_val_loss"]
    last_line = log_path.read_bytes().rpartition(b"\n{")[2] if log_path.exists() else b""
    if iter_num > max_iters or iter_num == max_iters and b'"event": "end"' in last_line:
        print0(f"{out_dir} is at step {iter_num}, max_iters = {max_iters}: nothing left to do")
        raise SystemExit

# -- processes, device and data; ptdevice and ptdtype are PyTorch's objects for the settings device and dtype
rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))  # torchrun sets them
world_size = int(os.environ.get("WORLD_SIZE", "1"))
ptdevice = runtime.pick_device(device)
ptdtype = runtime.pick_dtype(dtype, ptdevice)
dtype = settings["dtype"] = str(ptdtype).removeprefix("torch.")
cuda = ptdevice.type == "cuda"
if cuda:
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
if gradient_accumulation_steps % world_size and not eval_only:
    raise UserError(f"{gradient_accumulation_steps = }: it must be a multiple of {world_size}, the number of processes")
if world_size > 1:
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    sys.excepthook = report_error  # instead of its own, which holds back our message
    atexit.register(dist.destroy_process_group)
    if local_rank > 0:
        dist.barrier()  # until the first process of this machine has prepared the data, if they are not there yet
data = load_dataset(ensure_prepared(dataset))
if world_size > 1:
    if local_rank == 0:
        dist.barrier()
    begins = [None] * world_size  # after this, all have read the folder, and the first may write to it
    dist.all_gather_object(begins, f"step {iter_num}, text {data.meta['sha256']['train']:.8}")
    if len(set(begins)) > 1:
        raise UserError(f"the processes begin at {begins}: out_dir = {out_dir!r} and dataset must be the same for all")
tokens = data.meta["tokens"]  # of each split
if block_size >= tokens["train"] and not eval_only:
    raise UserError(f"block_size = {block_size} is too long: the train split has {tokens['train']} tokens")
if ckpt and data.tokenizer.state() != ckpt["tokenizer"]:
    cure = f"choose another --dataset, or prepare its text with --tokenizer=run:{source or out_dir}"
    raise UserError(f"dataset = {dataset!r} does not have the tokens of {ckpt['path']}: {cure}")
if resuming and not eval_only and data.meta["sha256"] != ckpt["data"]["sha256"]:
    cure = "name the folder of those data with --dataset, or prepare them again as before"
    raise UserError(f"dataset = {dataset!r} has other data than {out_dir}, {ckpt['data']['source']}: {cure}")
tokens_per_iter = batch_size * gradient_accumulation_steps * block_size

# -- model and optimizer
torch.manual_seed(seed)
vocab_size = data.meta["vocab_size"]
vocab_size += -vocab_size % 64 if vocab_size > 10_000 else 0  # GPT-2's 50,257 would misalign a GPU's products
raw_model = GPT(replace(config, vocab_size=vocab_size))
if resuming:
    raw_model.load_state_dict(ckpt["model"])
elif source:  # all weights that fit
    initial = raw_model.state_dict()
    scales = () if qk_scale == was["qk_scale"] else (".a", ".b", ".log_a")  # of another meaning there
    fitting = {k: v for k, v in ckpt["model"].items() if k in initial and v.shape == initial[k].shape}
    weights = {k: v for k, v in fitting.items() if not k.endswith(scales)}
    raw_model.load_state_dict(weights, strict=False)
    for what, names in (("new weights, not from", initial), ("weights not copied from", ckpt["model"])):
        names = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names.keys() - weights.keys()})
        if names:
            print0(f"NOTE    {what} {init_from}: {', '.join(names)}")
raw_model.to(ptdevice)
optimizer = raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), ptdevice.type)
scaler = torch.amp.GradScaler(ptdevice.type, enabled=ptdtype == torch.float16)
if resuming and not eval_only:
    optimizer.load_state_dict(ckpt["optimizer"])
    scaler.load_state_dict(ckpt["scaler"])
ckpt = None  # frees its memory
# without autocast's cache, since CUDA graphs need each cast of a weight
ctx = torch.autocast(ptdevice.type, ptdtype, enabled=ptdtype != torch.float32, cache_enabled=not cuda)
stop = runtime.StopSignal()


def all_reduce(tensor, operation="SUM"):
    """Return the sum, or "MAX", of a tensor over all processes."""
    if world_size > 1:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
    return tensor


def signal_number():
    """Return the number of a signal that one of the processes has received, or 0."""
    return all_reduce(torch.tensor(stop.number), "MAX").item()  # on the CPU: no wait for the GPU


def get_batch(iter_num, micro_step):
    """Return x and y, (B, T): a pure function of the seed, the step and the micro-step."""
    batch = data.batch(seed, iter_num, micro_step, batch_size, block_size, micro_steps=gradient_accumulation_steps)
    # pinned memory is copied while the GPU computes
    return [ids.pin_memory().to(ptdevice, non_blocking=True) if cuda else ids.to(ptdevice) for ids in batch]


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
    """Return the mean loss in nats per token, or nan if a signal arrives. No random number is drawn."""
    raw_model.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # the total loss and the number of tokens
    for x, y in data.windows(split, batch_size, block_size, max_tokens, rank, world_size):
        if signal_number():
            return math.nan
        count = (y >= 0).sum().item()
        with ctx:
            loss = raw_model(x.to(ptdevice), y.to(ptdevice))[1]
        if count:  # a batch may have none, to keep the processes in step
            sums += torch.tensor([loss.item() * count, count])
    raw_model.train()
    total, count = all_reduce(sums).tolist()
    return total / count


def in_units(val_loss):
    """Return a validation loss also as perplexity and, comparable across tokenizers, in bits per byte of text."""
    bits_per_byte = val_loss / math.log(2) * tokens["val"] / data.meta["bytes"]["val"]
    return {"val_loss": val_loss, "perplexity": math.exp(min(val_loss, 700)), "bits_per_byte": bits_per_byte}


# -- summary of the run
try:
    flops_per_token = raw_model.flops_per_token()
except Exception:  # PyTorch cannot count an edit with .item(); whatever else is wrong with it shows in the first step
    flops_per_token = math.nan
parameters, machine = raw_model.get_num_params(), runtime.machine_name(ptdevice)
size = f"{n_layer} layers, width {n_embd}, {n_head} heads, {parameters:,} parameters"
method = f"{attention} attention, {residual} residual{', input kept' if keep_input else ''}"
print0(f"model   {method}: {size}, from {init_from}")
print0(f"data    {data.meta['source']} ({dataset}): {tokens['train']:,} training, {tokens['val']:,} validation tokens")
print0(f"device  {machine}, {dtype}; run in {out_dir}")
unused = {"qk_scale": attention != "summed_qk", "sigma": attention != "w2", "keep_input": residual == "standard"}
for name, idle in unused.items():
    if idle and name in given:
        print0(f"NOTE    {name} = {given[name]!r} has no effect with {method}")

SHOWN = "validation loss {val_loss:.4f}   perplexity {perplexity:.2f}   bits per byte {bits_per_byte:.3f}"
if eval_only:
    losses = in_units(estimate_loss("val", max_tokens=tokens["val"]))
    print0(f"{SHOWN.format_map(losses)}   over all {tokens['val']:,} tokens")
    raise SystemExit
epochs = max_iters * tokens_per_iter / tokens["train"]
print0(f"steps   {iter_num:,} to {max_iters:,} with {tokens_per_iter:,} tokens each, {epochs:.3g} epochs")

# -- the log, and the loss of a step: compiled, and as CUDA graphs or distributed
steps_per_eval = eval_interval or max(50, math.ceil(max_iters / 4))
eval_steps = {*range(steps_per_eval, max_iters, steps_per_eval), max_iters}


def log(event, **facts):
    """Write a line of JSON, which has no inf and nan: they are null."""
    facts = {k: None if isinstance(fact, float) and not math.isfinite(fact) else fact for k, fact in facts.items()}
    line = json.dumps({"event": event, "step": iter_num, **facts}).encode() + b"\n" if rank == 0 else b""
    while line:  # on a full disk only a part of it is written, and an error comes with the next part
        line = line[log_file.write(line) :]


def save(name):
    """Write a checkpoint of this step."""
    if rank == 0:
        state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        progress = {"iter_num": iter_num, "best_val_loss": best_val_loss, "tokenizer": data.tokenizer.state()}
        with atomic_write(log_path.with_name(name)) as file:
            torch.save({"version": runtime.VERSION} | about | state | progress, file)


if rank == 0:
    log_file = runtime.open_log(log_path, checkpoints, iter_num, evaluates=iter_num in eval_steps)
    for path in checkpoints if replacing else []:
        path.unlink()
about = {"settings": settings, "config": asdict(raw_model.config), "data": data.meta, "machine": machine}
about["commit"] = runtime.git_commit()
log("resume" if resuming else "start", **about, parameters=parameters, flops_per_token=flops_per_token)
loss_of, graphed = runtime.Loss(raw_model, compile), False
if world_size > 1:
    loss_of = DistributedDataParallel(loss_of, gradient_as_bucket_view=True)
elif graphs and cuda:
    with ctx:
        loss_of, graphed = runtime.capture(loss_of, *get_batch(iter_num, 0))

# -- training
micro_steps = range(rank, gradient_accumulation_steps, world_size)  # this process's share of each step
stop.listen()  # to Ctrl-C, SIGTERM, SIGUSR1 and the like: finish the step, save and exit
stopped_by = 0  # the signal's number
logged_iter = iter_num  # step of the latest log line
first_iter = iter_num  # step at which this process begins
began = t0 = time.perf_counter()

while True:
    # evaluate: a run resumed at this step does it again, since its checkpoint was saved before the evaluation
    if iter_num in eval_steps and not stopped_by:
        train_loss, val_loss = estimate_loss("train", max(1, eval_tokens // 16)), estimate_loss("val", eval_tokens)
        stopped_by = signal_number()
        if stopped_by:
            break
        losses = {"train_loss": train_loss, **in_units(val_loss)}
        print0(f"step {iter_num:,}   train loss {train_loss:.4f}   {SHOWN.format_map(losses)}")
        log("eval", **losses)
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            save("best.pt")
        t0 = time.perf_counter()
    if iter_num >= max_iters or stopped_by:
        break

    # forward and backward
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = 0.0
    for micro_step in micro_steps:
        if world_size > 1:  # synchronize gradients only at the last micro-step
            loss_of.require_backward_grad_sync = micro_step == micro_steps[-1]
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
    optimizer.zero_grad(set_to_none=not graphed)  # see runtime.capture
    iter_num += 1

    stopped_by = signal_number()
    saving = iter_num % checkpoint_interval == 0 or iter_num in eval_steps or stopped_by
    if not (saving or iter_num % log_interval == 0):
        continue  # most steps end here

    # log and save
    lossf = (all_reduce(loss) / world_size).item()  # only here, because it waits for the GPU
    norm = grad_norm.item()
    rescaling = scaler.is_enabled() and scaler.get_scale() > 1  # an overflow only skips a step and lowers the scale
    if not math.isfinite(lossf) or (not math.isfinite(norm) and not rescaling):
        log("diverged")
        found = f"at step {iter_num} (loss {lossf}, gradient norm {norm})"
        likely = f"learning_rate = {learning_rate}, weight_decay = {weight_decay} or dtype = {dtype}"
        raise UserError(f"the run has diverged {found}, most likely because of {likely}")  # compare.py reads this
    speed = (iter_num - logged_iter) * tokens_per_iter / (time.perf_counter() - t0)
    mfu = flops_per_token * speed / world_size / runtime.peak_flops(ptdevice)
    seconds_left = (time.perf_counter() - began) / (iter_num - first_iter) * (max_iters - iter_num)
    print0(
        f"step {iter_num:,}/{max_iters:,}   loss {lossf:.4f}   gradient norm {norm:.3f}   lr {lr:.2e}   "
        f"{speed:,.0f} tokens/s   {'' if math.isnan(mfu) else f'MFU {mfu:.1%}   '}"
        f"{timedelta(seconds=round(seconds_left))} left"
    )
    log("step", loss=lossf, grad_norm=norm, learning_rate=lr, tokens_per_second=speed)
    logged_iter = iter_num
    if saving:
        save("ckpt.pt")
    t0 = time.perf_counter()

resume = f"python train.py --init_from=resume --out_dir={out_dir} --max_iters="
if stopped_by:
    print0(f"stopped after step {iter_num:,}, saved in {out_dir}/ckpt.pt; to resume: {resume}{max_iters}")
    raise SystemExit(128 + stopped_by)
seconds = time.perf_counter() - began
log("end", seconds=seconds, best_loss=best_val_loss)
print0(f"{timedelta(seconds=round(seconds))} for {iter_num - first_iter:,} steps")
print0(f"lowest validation loss {best_val_loss:.4f}: {out_dir}/best.pt; latest: {out_dir}/ckpt.pt")
print0(f"to train longer: {resume}{2 * max_iters}")
print0(f"to sample from it: python sample.py --out_dir={out_dir}")
