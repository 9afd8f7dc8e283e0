"""
Trains a GPT: python train.py config/m1_shakespeare.py --max_iters=200

Settings are the plain variables below, changed by any number of config files and then by
--name=value; --help lists them. A run that was stopped or killed goes on, as if it had not been,
with the same command and --init_from=resume. On several GPUs:
torchrun --standalone --nproc_per_node=8 train.py config/m1_shakespeare.py --grad_accum_steps=8
"""

import errno
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from config import check_range, fail, pick_attention_kernel, pick_device, pick_dtype, read_settings, user_errors
from config import meet, spread, spread_like, whole, whole_state
from data import clear_leftovers, first_tokens, hf_tokenizer, load, lock, mix, replace_file
from model import GPT, GPTConfig
from sample import CHECKPOINT_VERSION, check_tensors, load_checkpoint, restore_model, write_text

# -----------------------------------------------------------------------------
# run
out_dir = ""  # folder of the run; empty: out/ and the names of the config files
init_from = "scratch"  # scratch; resume: go on from the run's latest checkpoint; hf:NAME: a Llama, by folder or hub name
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
attention = "standard"  # standard, w2, summed_qk
qk_scale = "5.1"  # of summed_qk: 5.1 to 5.7
sigma = "scalar"  # of w2: scalar, diagonal
residual = "standard"  # standard, m1, m2, m3.1, m3.2, m4.1, m4.2
keep_input = False  # m1 to m4: add the residual that the sum replaces back to it
rope_theta = 10000.0  # base of RoPE's wavelengths
norm_eps = 1e-5  # of RMSNorm
tie_weights = False  # one matrix for embedding and head
checkpoint_replays = False  # m1 to m4: less memory, for a second forward pass of the replays
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
# keeping
checkpoint_interval = 200  # steps between checkpoints
checkpoint_minutes = 10.0  # minutes between checkpoints, where the steps take longer; 0: no limit
skip_bad_steps = 0  # steps in a row that may be skipped because their loss or gradient is not finite
# watching
eval_interval = 200  # steps between evaluations
eval_tokens = 131072  # tokens evaluated in each split, at most
log_interval = 10  # steps between log lines
sample_tokens = 300  # tokens of text shown at the end; 0: none
tensorboard = False  # what goes to log.jsonl goes to TensorBoard too, in the run's folder
wandb = False  # and to Weights & Biases, under the name of the run's folder
# system
device = "auto"  # auto, cpu, cuda, cuda:1, mps
dtype = "auto"  # auto, float32, bfloat16, float16
compile = "auto"  # auto: on a GPU; true, false
parallel = "ddp"  # under torchrun: ddp, or fsdp: the parameters too are spread over the processes

settings = read_settings(__file__)  # the above <- config files <- --name=value
globals().update(settings)

# what a resumed run may change; a change of anything else would make it another run
MAY_CHANGE = {"out_dir", "init_from", "overwrite", "max_iters", "device", "compile", "parallel"}
MAY_CHANGE |= {"checkpoint_interval", "checkpoint_minutes", "skip_bad_steps"}
MAY_CHANGE |= {"eval_interval", "eval_tokens", "log_interval", "sample_tokens", "tensorboard", "wandb"}

# what a Llama to start from brings along
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "bias", "rope_theta", "norm_eps", "tie_weights")

# which of how many processes this is; torchrun says so
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
job = f"{os.environ.get('TORCHELASTIC_RUN_ID')}-{os.getppid()}"  # the same for those that it starts in place of dead ones

# -----------------------------------------------------------------------------
# set-up: where, on what, with which model


def check_settings():
    """Raises ValueError for a setting that cannot work, as far as the model and the data do not check it."""
    choices = {
        "init_from": ("scratch", "resume", init_from if init_from.startswith("hf:") else "hf:NAME"),
        "optimizer": ("adamw", "muon"),
        "lr_decay": ("cosine", "linear", "none"),
        "compile": ("auto", "true", "false"),
        "parallel": ("ddp", "fsdp"),
    }
    for name, good in choices.items():
        if settings[name] not in good:
            raise ValueError(f"{name} = {settings[name]!r} does not work: it must be one of {', '.join(good)}")
    check_range(settings, "batch_size block_size grad_accum_steps max_iters", 1)
    if grad_accum_steps % world:
        good = f"it must be a multiple of {world}, the number of processes, which share it out"
        raise ValueError(f"grad_accum_steps = {grad_accum_steps} does not work: {good}")
    check_range(settings, "checkpoint_interval eval_interval eval_tokens log_interval", 1)
    check_range(settings, "n_kv_head n_inner warmup_iters sample_tokens checkpoint_minutes skip_bad_steps", 0)
    check_range(settings, "learning_rate min_lr_frac weight_decay grad_clip", 0)
    check_range(settings, "beta1 beta2", 0, 1)
    check_range(settings, "seed", 0, 2**63)
    for package in ("tensorboard", "wandb"):
        if settings[package] and not find_spec(package):
            raise ValueError(f"{package} = True needs a package: pip install {package}")
    if not out_dir.isprintable():
        raise ValueError(f"out_dir = {out_dir!r} does not work: it must be a name that can be shown")
    if overwrite and init_from == "resume":
        raise ValueError("overwrite = True and init_from = 'resume' contradict each other: leave one out")


def prepare_data():
    """The dataset's folder. Runs its prepare.py unless that has been done since its input.txt changed."""
    scripts = Path(__file__).resolve().parent.glob("data/*/prepare.py")
    folders = {script.parent.name: script.parent for script in sorted(scripts)}
    if dataset not in folders:
        raise ValueError(f"dataset = {dataset!r} does not work: it must be one of {', '.join(folders)}")
    folder = folders[dataset]
    text, meta = folder / "input.txt", folder / "meta.json"
    with open(folder / "prepare.py", "rb") as script:
        lock(script, wait=True)  # of runs that start together one prepares, and the others wait for it
        if not meta.exists() or text.exists() and text.stat().st_mtime > meta.stat().st_mtime:
            why = "its input.txt is new" if meta.exists() else "it has not been prepared"
            print(f"data/{dataset}: {why}, running data/{dataset}/prepare.py", flush=True)
            if subprocess.run([sys.executable, folder / "prepare.py"]).returncode:
                sys.exit(2)
    return folder


def check_free():
    """Raises ValueError if a new run would replace what the folder holds."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out_dir = {out} is a file: name a folder")
    if (latest.exists() or best.exists()) and not overwrite:
        ways = "--init_from=resume goes on with it, --overwrite=true replaces it, --out_dir=FOLDER leaves it alone"
        raise ValueError(f"{out} already holds a run: {ways}")
    if out.exists() and any(out.iterdir()) and not any(path.exists() for path in (latest, best, log_file)):
        raise ValueError(f"out_dir = {out} holds files that are not of a run: name a new folder")


def load_resumable(path):
    """The checkpoint to resume from. Raises ValueError if it is not whole, or not of the run that this command is."""
    try:
        saved = load_checkpoint(path)
    except ValueError as error:
        way_out = f"; without it the run goes on from {best}" if path.exists() and best.exists() else ""
        raise ValueError(f"{error}{way_out}") from None
    settings["init_from"] = str(saved["settings"].get("init_from"))  # how it began
    if settings["init_from"].startswith("hf:"):
        settings.update({name: saved["settings"].get(name) for name in SHAPE})
    for name, value in settings.items():
        before = saved["settings"].get(name)
        if name not in MAY_CHANGE and (type(value) is not type(before) or value != before):
            raise ValueError(f"{name} = {value!r}, but {path} was trained with {before!r}: resume with that")
    if saved["data"]["sha256"] != data.meta["sha256"]:
        source = saved["data"]["source"]
        raise ValueError(f"data/{dataset} is not what {path} was trained on: prepare {source} again")
    if saved["step"] >= max_iters:
        raise ValueError(f"max_iters = {max_iters}, but {path} has come to step {saved['step']}: give more to go on")
    return saved


def make_config(vocab_size):
    """The shape and the method that the settings describe."""
    chosen = {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}
    or_none = {name: settings[name] or None for name in ("n_kv_head", "n_inner")}
    return GPTConfig(**chosen | or_none | {"vocab_size": vocab_size})


def make_model():
    """A model of random weights, or the Llama to start from under this run's attention and residual. Raises ValueError
    if the data are not in that Llama's tokens."""
    if init_from == "scratch":
        return GPT(make_config(data.meta["vocab_size"]))
    name = init_from.removeprefix("hf:")
    if data.tokenizer.state() != hf_tokenizer(name).state():
        raise ValueError(f"data/{dataset} is not in the tokens of {name}: prepare it with --tokenizer={init_from}")
    of_run = {field.name for field in fields(GPTConfig)} & settings.keys() - set(SHAPE)
    model = GPT.from_pretrained(name, {field: settings[field] for field in of_run})
    settings.update({field: getattr(model.config, field) for field in SHAPE})
    return model


@user_errors()
def agree(*numbers):
    """The largest that any process has of each number, as integers."""
    numbers = torch.tensor(numbers, dtype=torch.int64)
    if world > 1:
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


def is_restarted():
    """Whether torchrun has started all processes again, one having died, and they have a run of theirs to go on with."""
    if agree(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))) == [0]:
        return False
    begun = log_file.exists() and json.dumps({"job": job})[1:-1].encode() in log_file.read_bytes()
    return agree(begun and (latest.exists() or best.exists())) == [1]


def make_optimizers():
    adamw = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), on.type)
    if optimizer == "adamw":
        return [adamw]
    hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
    for group in adamw.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not matrix for matrix in hidden)]
    # adjust_lr_fn gives Muon's updates the size of AdamW's, so one learning rate serves both
    return [torch.optim.Muon(hidden, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw"), adamw]


def restore_optimizer(opt, state):
    """Gives `opt` what it had learned of its gradients. Raises ValueError if that does not fit the parameters."""
    names = ["momentum_buffer"] if isinstance(opt, torch.optim.Muon) else ["step", "exp_avg", "exp_avg_sq"]
    parameters = [p for group in opt.param_groups for p in group["params"]]
    given = {(i, name): tensor for i, of_one in state.items() for name, tensor in of_one.items()}
    wanted = {(i, name): p for i, p in enumerate(parameters) for name in names}
    wanted |= {key: torch.tensor(0.0) for key in wanted if key[1] == "step"}
    if state or bad_steps < step and not scaler.is_enabled():  # empty only if all steps so far were skipped
        check_tensors(given, wanted)
    for i, name in given:
        if name != "step":
            state[i][name] = spread_like(parameters[i], state[i][name])
    opt.load_state_dict({"state": state, "param_groups": opt.state_dict()["param_groups"]})


def open_log(step):
    """log.jsonl, for this process alone, without what comes after `step`: that will happen again, and be noted."""
    out.mkdir(parents=True, exist_ok=True)
    log = open(log_file, "ab", buffering=0)
    if not lock(log):
        raise ValueError(f"{out}: another process is training there: wait for it, or choose another --out_dir")
    end = 0
    for line in log_file.read_bytes().splitlines(keepends=True):
        try:
            later = json.loads(line)["step"] > step
        except (KeyError, RecursionError, TypeError, ValueError):
            later = False  # not a line of ours; it stays
        if later or not line.endswith(b"\n"):
            break
        end += len(line)
    log.truncate(end if step else 0)
    return log


def open_trackers():
    """What else takes the numbers of a line of log.jsonl and their step: functions, by name."""
    trackers = {}
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out, purge_step=step + 1)  # what came after the checkpoint will happen again
        trackers["TensorBoard"] = lambda numbers, step: [writer.add_scalar(name, x, step) for name, x in numbers.items()]
    if wandb:
        from wandb import init

        id_file = out / "wandb.id"  # by which a resumed run finds itself again
        known = id_file.read_text() if saved and id_file.exists() else None
        try:
            run = init(name=out.name, id=known, resume="allow" if known else None, config=settings, dir=out)
        except Exception as error:  # of no account, no network, ... with types of their own
            raise ValueError(f"Weights & Biases does not start: {error}") from None
        id_file.write_text(run.id)
        trackers["Weights & Biases"] = lambda numbers, step: run.log(numbers, step=step)
    return trackers


with user_errors():
    check_settings()
    config_names = [Path(argument).stem for argument in sys.argv[1:] if not argument.startswith("-")]
    out = Path(out_dir or "out/" + ("-".join(config_names) or dataset))
    latest, best, log_file = out / "ckpt.pt", out / "best.pt", out / "log.jsonl"
    on = pick_device(device)
    if world > 1:
        on = meet(on, rank, world)
    if is_restarted():
        init_from, overwrite = "resume", False
    precision = pick_dtype(dtype, on)
    settings["dtype"] = str(precision).removeprefix("torch.")  # what auto has come to: a resumed run must keep it
    machine = torch.cuda.get_device_name(on) if on.type == "cuda" else f"{torch.get_num_threads()} threads"
    machine = f"{world} x " * (world > 1) + f"{on} ({machine}), torch {torch.__version__}"

    data = load(prepare_data())
    data.check_content()
    data.batch(seed, 0, 0, batch_size, block_size)  # what would fail at the first step fails before anything is written

    step, bad_steps, val_loss, best_loss = 0, 0, math.inf, math.inf
    if init_from == "resume":
        resumed = best if best.exists() and not latest.exists() else latest
        saved = load_resumable(resumed)
        model = restore_model(saved, resumed)
        if model.config != make_config(model.config.vocab_size):
            raise ValueError(f"{resumed}: damaged: its config and its settings are not of one model")
        step, bad_steps, val_loss = saved["step"], saved["bad_steps"], saved["val_loss"]
        if best.exists():  # asked itself, since it may be newer than the latest checkpoint
            try:
                best_loss = load_checkpoint(best)["val_loss"]
            except ValueError as error:
                raise ValueError(f"{error}; the run goes on without it if you move it away") from None
    else:
        saved = None
        check_free()
        torch.manual_seed(seed)
        model = make_model()
    config = model.config
    if config.vocab_size < data.meta["vocab_size"]:
        raise ValueError(f"data/{dataset} has {data.meta['vocab_size']} different tokens, the model {config.vocab_size}")

    compiling = compile == "true" or compile == "auto" and on.type == "cuda"
    if compiling:
        model.compile()
    trained = spread(model, parallel, on) if world > 1 else model.to(on)
    optimizers = make_optimizers()
    scaler = torch.amp.GradScaler(on.type, enabled=precision == torch.float16)
    if saved:
        try:
            for opt, state in zip(optimizers, saved["optimizers"], strict=True):
                restore_optimizer(opt, state)
            if not all(isinstance(value, (int, float)) for value in saved["scaler"].values()):
                raise ValueError("its scaler is not made of numbers")
            scaler.load_state_dict(saved["scaler"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{resumed}: damaged: its training state does not fit: {error}") from None
    if world > 1:
        dist.barrier()  # from here on the first process writes to the folder, which the others have now seen as it was
    log = open_log(step) if rank == 0 else open(os.devnull, "wb", buffering=0)
    trackers = open_trackers() if rank == 0 else {}
    if rank == 0:
        clear_leftovers(out)
        if not saved:  # the run that was here goes, now that nothing is left that could be refused
            latest.unlink(missing_ok=True)
            best.unlink(missing_ok=True)

pick_attention_kernel(model, on, precision)
if on.type == "cuda":
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
autocast = torch.autocast(on.type, precision) if precision != torch.float32 else nullcontext()

# -----------------------------------------------------------------------------
# the pieces of the loop


def learning_rate_at(step):
    """Warm-up, then decay to min_lr_frac of the learning rate at max_iters."""
    if step < warmup_iters:
        return learning_rate * (step + 1) / warmup_iters
    done = (step - warmup_iters) / max(max_iters - warmup_iters, 1)
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "none": 1}[lr_decay]
    return learning_rate * (min_lr_frac + (1 - min_lr_frac) * left)


def batch(step, shard):
    """x and y of a micro-step, a pure function of (seed, step, shard)."""
    x, y = data.batch(seed, step, shard, batch_size, block_size, grad_accum_steps)
    if on.type == "cuda":  # pinned memory travels while the GPU computes
        return x.pin_memory().to(on, non_blocking=True), y.pin_memory().to(on, non_blocking=True)
    return x.to(on), y.to(on)


def loss_of(x, y):
    with autocast:
        return trained(x, y)[1]


@user_errors()
def add_gradients():
    """Adds up the gradients of the step's micro-steps, of all processes; their mean loss, still on the device."""
    total, shards = 0, range(rank, grad_accum_steps, world)
    for shard in shards:
        if trained is not model and parallel == "ddp":  # which adds up over the processes at the last one only
            trained.require_backward_grad_sync = shard == shards[-1]
        torch.manual_seed(mix(seed, step, shard))  # what dropout drops is a pure function of these, as the batch is
        loss = loss_of(*batch(step, shard)) / len(shards)
        scaler.scale(loss).backward()
        total = total + loss.detach()
    if world == 1:
        return total
    for p in model.parameters():
        if parallel == "fsdp" and p.dim() == 0:
            add_up(p.grad).div_(world)
    return add_up(total) / world


def add_up(tensor):
    """The sum of the processes' tensors, in place."""
    if world > 1:
        dist.all_reduce(tensor)
    return tensor


@user_errors()
def update(loss):
    """The optimizers' step, unless it may not be taken."""
    for opt in optimizers:
        scaler.unscale_(opt)
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf))
    usable = is_usable(loss, norm)
    for opt in optimizers:
        if usable:
            scaler.step(opt)
        opt.zero_grad()
    scaler.update()


@user_errors()
def try_compiled():
    """Compiles the model by trying it; eager if that fails."""
    say("compiling ...")
    try:
        loss_of(*batch(0, 0)).backward()
    except Exception as error:  # a missing C++ compiler, an old GPU: whatever it is, eager works
        torch.compiler.set_stance("force_eager")
        say(f"not compiled, eager from here: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    model.zero_grad()


@user_errors()
@torch.no_grad()
def evaluate(split):
    """Mean loss in nats per token over fixed windows: the same ones each time, and no random number drawn."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # of losses, and of the tokens they are about
    for x, y in data.windows(split, batch_size, block_size, eval_tokens, rank, world):
        counted = (y >= 0).sum().item()
        loss = loss_of(x.to(on), y.to(on))
        if counted:
            sums += torch.tensor([loss.item() * counted, counted])
    model.train()
    total, tokens = add_up(sums).tolist()
    return total / tokens


def give_up(why):
    """Ends a run that has gone wrong, and leaves its checkpoints as they are."""
    kept = f"{out} holds step {saved_step}" if saved_step else "nothing has been saved"
    say("")
    fail(f"{why}; {kept}")


CURE = f"a lower learning_rate than {learning_rate} may help, or skip_bad_steps"


def is_usable(loss, norm):
    """Whether the step may be taken, loss and gradient being finite.

    Without skip_bad_steps the answer is looked at later, by check_health, so as not to wait for the GPU at every
    step. With float16 a gradient may well overflow, until the scaler has found its scale.
    """
    global first_bad_step, bad_steps
    finite = (loss + norm).isfinite()
    if not skip_bad_steps and not scaler.is_enabled():
        first_bad_step = torch.where(finite | (first_bad_step > 0), first_bad_step, step + 1)
        return True
    if finite:
        bad_steps = 0
        return True
    if not (scaler.is_enabled() and scaler.get_scale() > 1 and loss.isfinite()):
        bad_steps += 1
        if bad_steps > skip_bad_steps:
            in_a_row = f" and the {skip_bad_steps} before it" if skip_bad_steps else ""
            give_up(f"the loss or its gradient is not finite at step {step + 1}{in_a_row}: {CURE}")
        say(f"step {step + 1} is skipped: its loss or gradient is not finite")
        note("skipped", step=step + 1)
    return False


def check_health():
    """Ends the run if one of its steps so far was taken with a loss or gradient that was not finite."""
    if first_bad_step > 0:
        give_up(f"the loss or its gradient is not finite at step {first_bad_step}: {CURE}")


@user_errors()
def save(path):
    """Writes a checkpoint; whether that worked. Where it did not, the one before is still whole."""
    check_health()
    write_log()
    try:
        data.check_unchanged()
    except ValueError as error:
        give_up(f"{error}; go on with --init_from=resume and the data as it was")
    weights = whole_state(model.state_dict(), keep=rank == 0)
    learned = [whole_state(opt.state_dict()["state"], keep=rank == 0) for opt in optimizers]
    written = rank > 0 or write(path, weights, learned)  # the first process writes for all
    return not agree(not written)[0]


def write(path, weights, learned):
    """Writes the checkpoint of these; whether that worked."""
    state = {
        "version": CHECKPOINT_VERSION,
        "config": asdict(config),
        "settings": settings,
        "data": {name: data.meta[name] for name in ("source", "warning", "sha256")},
        "tokenizer": data.tokenizer.state(),
        "machine": machine,
        "step": step,
        "bad_steps": bad_steps,
        "val_loss": val_loss,
        "model": weights,
        "optimizers": learned,
        "scaler": scaler.state_dict(),
    }
    try:
        with replace_file(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # PyTorch wraps what `file` raises
        if not isinstance(cause, OSError):
            raise
        say(f"NOT SAVED: {path} at step {step}: {cause.strerror}; what was there is whole, and training goes on")
        return False
    return True


if rank > 0 or not sys.stdout:  # the first process speaks for all; there is no stdout after >&-
    sys.stdout = open(os.devnull, "w")
sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
on_terminal = sys.stdout.isatty()


def say(line, lasting=True):
    """Prints a line; on a terminal, one that is not lasting makes room for the next."""
    try:
        if on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r\x1b[K" + (line if lasting else line[:width]), end="\n" if lasting else "", flush=True)
        else:
            print(line, flush=True)
    except OSError as error:  # no reason to lose a run; where a disk is full, the line waits in a buffer
        if error.errno in (errno.EPIPE, errno.EIO):  # the reader or the terminal has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(event, **facts):
    """A line of log.jsonl, of this step unless the facts name another."""
    global unwritten
    unwritten += json.dumps({"event": event, "step": step, **facts}).encode() + b"\n"
    write_log()
    numbers = {name: fact for name, fact in facts.items() if isinstance(fact, (int, float))}
    for tracker, track in list(trackers.items()):
        try:
            track({f"{event}/{name}": number for name, number in numbers.items()}, step)
        except Exception as error:  # a full disk, a lost network: no reason to lose a run
            del trackers[tracker]
            say(f"NOT TRACKED from step {step} on: {tracker}: {error}; training goes on")


def write_log():
    """Writes the lines of log.jsonl that are not yet written. What cannot be written now is written later."""
    global unwritten
    try:
        unwritten = unwritten[log.write(unwritten) :]
    except OSError as error:
        say(f"NOT WRITTEN: {log_file} at step {step}: {error.strerror}; training goes on, and will try again")


def stop(number, _):
    """On Ctrl-C, SIGTERM or SIGHUP: finish the step, save and leave. A second signal ends the program at once,
    but for torchrun, which passes on to all processes what a terminal has sent to them already."""
    global stop_signal
    stop_signal = number
    listen(signal.SIG_DFL if world == 1 else signal.SIG_IGN)


def listen(handler):
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it, and means it
            signal.signal(number, handler)


def clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


# -----------------------------------------------------------------------------
# what is about to happen

unwritten = b""  # lines of the log
saved_step = step  # to resume from; 0: nothing has been saved
first_bad_step = torch.zeros((), dtype=torch.int64, device=on)  # 0: none so far
tokens_per_step = batch_size * grad_accum_steps * block_size
tokens, in_bytes = data.meta["tokens"], data.meta["bytes"]
method = f"{attention} attention" + {"w2": f" ({sigma} σ)", "summed_qk": f" ({qk_scale})"}.get(attention, "")
method += f", {residual} residual" + (" + input" if keep_input and residual != "standard" else "")
size = f"{config.n_layer} layers, width {config.n_embd}, {config.n_head} heads, {model.get_num_params():,} parameters"
say(f"model   {method}: {size}" + f", from {settings['init_from']}" * settings["init_from"].startswith("hf:"))
counts = f"{tokens['train']:,} tokens to train on, {tokens['val']:,} to validate on"
say(f"data    {data.meta['source']} (data/{dataset}): {counts}")
if data.meta["warning"]:
    say(f"NOTE    {data.meta['warning']}")
epochs = max_iters * tokens_per_step / tokens["train"]
say(f"steps   {step:,} to {max_iters:,} of {tokens_per_step:,} tokens, {epochs:.3g} epochs in all, {optimizer}")
say(f"device  {machine}, {settings['dtype']}; run in {out}")
if saved and saved["machine"] != machine:
    say(f"NOTE    so far it ran on {saved['machine']}: the same run from here, but not to the last bit")
run = {"settings": settings, "config": asdict(config), "data": data.meta, "machine": machine, "job": job}
note("resume" if saved else "start", parameters=model.get_num_params(), **run)

if compiling:
    try_compiled()

# -----------------------------------------------------------------------------
# the loop

stop_signal = 0  # none
listen(stop)
began = last_save = time.time()
first_step, seconds = step, 0.0  # seconds of training, without evaluating and saving
last_step, last_time = step, began  # of the latest log line
while step < max_iters:
    rate = learning_rate_at(step)
    for opt in optimizers:
        for group in opt.param_groups:
            group["lr"] = rate

    loss = add_gradients()
    update(loss)
    step += 1

    late = 0 < checkpoint_minutes < (time.time() - last_save) / 60
    stopped_by, late = agree(stop_signal, late)
    stopping = stopped_by or step == max_iters
    evaluating = step % eval_interval == 0 or step == max_iters
    saving = step % checkpoint_interval == 0 or late or stopping

    if step % log_interval == 0 or evaluating:
        check_health()
        train_loss = loss.item()  # waits for the GPU, so not at every step
        now = time.time()
        seconds += now - last_time
        speed = (step - last_step) * tokens_per_step / (now - last_time)
        left = (now - began) / (step - first_step) * (max_iters - step)
        mfu = model.estimate_mfu((step - last_step) * tokens_per_step / block_size / world, now - last_time)
        mfu = "n/a" if math.isnan(mfu) else f"{mfu:.1%}"
        at = f"step {step:,}/{max_iters:,}   loss {train_loss:.4f}"
        say(f"{at}   {speed:,.0f} tokens/s   MFU {mfu}   {clock(left)} left", lasting=False)
        logged_loss = train_loss if math.isfinite(train_loss) else None  # JSON has no nan
        note("step", loss=logged_loss, learning_rate=rate, tokens_per_second=speed)
        last_step, last_time = step, now

    if evaluating:
        train_loss, val_loss = evaluate("train"), evaluate("val")
        if not math.isfinite(val_loss):
            give_up(f"the validation loss is {val_loss} at step {step}: {CURE}")
        perplexity = math.exp(min(val_loss, 700))
        bits_per_byte = val_loss / math.log(2) * tokens["val"] / in_bytes["val"]
        say(
            f"step {step:,}   train loss {train_loss:.4f}   validation loss {val_loss:.4f}   "
            f"perplexity {perplexity:.2f}   bits per byte {bits_per_byte:.3f}"
        )
        note("eval", train_loss=train_loss, val_loss=val_loss, perplexity=perplexity, bits_per_byte=bits_per_byte)
        if val_loss < best_loss and save(best):
            best_loss = val_loss

    if saving:
        if save(latest):
            saved_step = step
        last_save = time.time()
    if evaluating or saving:
        last_time = time.time()
    if stopping:
        break

listen(signal.SIG_DFL)
if world > 1:
    del trained  # DDP would keep the group
    dist.destroy_process_group()
if rank > 0:  # the first process says how it went; a thread of gloo's still at work would abort an end by way of Python
    os._exit(0)
arguments = [argument for argument in sys.argv if not argument.startswith(("--init_from", "--overwrite"))]
launcher = ["python"] if world == 1 else ["torchrun", "..."]
resume = shlex.join([*launcher, *arguments] + ["--init_from=resume"] * (latest.exists() or best.exists()))
if saved_step < step:
    give_up(f"step {step} could not be saved: make room, then {resume}")
if unwritten:
    give_up(f"the last lines of {log_file} could not be written")
if step < max_iters:
    say(f"stopped after step {step:,}, saved in {latest}; to go on: {resume}")
    sys.exit(128 + stopped_by)

elapsed, speed = time.time() - began, (step - first_step) * tokens_per_step / seconds
note("end", seconds=elapsed, tokens_per_second=speed, best_loss=best_loss if best.exists() else None)
say(f"{clock(elapsed)} for {step - first_step:,} steps, {speed:,.0f} tokens/s while training")
if sample_tokens and not (world > 1 and parallel == "fsdp"):
    say("-" * 80)
    tokenizer, generator = data.tokenizer, torch.Generator(on).manual_seed(seed)
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # each length of the context would be compiled anew
        write_text(model, tokenizer, first_tokens(tokenizer), sample_tokens, generator, temperature=0.8)
    say("-" * 80)
lowest = f"lowest validation loss {best_loss:.4f}: {best}" if best.exists() else f"{best} could not be saved"
say(f"{lowest}; latest: {latest}")
say(f"more text: python sample.py --out_dir={shlex.quote(str(out))}")
