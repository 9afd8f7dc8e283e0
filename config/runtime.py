"""Between a run and its machine: devices, the compiled or captured loss, signals, the files of a run's folder."""

import json
import math
import os
import signal
import subprocess
from contextlib import suppress
from glob import glob
from pathlib import Path

import torch

from config import ROOT, UserError, file_lock, print0

VERSION = 13  # of the layout of a checkpoint


def pick_device(device) -> torch.device:
    """Return the device of that name, or for "auto" the best one here. Under torchrun, each process has its own GPU."""
    mps = ["mps"] if torch.backends.mps.is_available() else []
    here = [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), *mps, "cpu"]
    name = here[0] if device == "auto" else device
    if name == "cuda" or name.startswith("cuda") and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if name not in here:
        raise UserError(f"device = {device!r} is not available: this machine has {', '.join(here)}")
    if name.startswith("cuda"):
        torch.cuda.set_device(name)
    return torch.device(name)


def pick_dtype(dtype, device) -> torch.dtype:
    """Return the type of that name, or for "auto" bfloat16 where `device` multiplies it fast, else float32."""
    if dtype == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:  # CPUs with AMX have avx512_bf16, too
            fast = device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16")
        dtype = "bfloat16" if fast else "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"dtype = {dtype!r} is invalid: choose auto, float32, bfloat16 or float16")
    if device.type == "mps" and dtype != "float32":  # reported for PyTorch's causal attention
        raise UserError(f"dtype = {dtype!r} does not work on mps, where 16 bits may leak future tokens: use float32")
    return getattr(torch, dtype)


def peak_flops(device) -> float:
    """Return the dense bfloat16 peak of a GPU in FLOP/s, from its maker's data sheet; nan where unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = {"B200": 2250e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H200": 989e12}
    peaks |= {"H100": 989e12, "L40S": 362e12, "A100": 312e12, "RTX 4090": 165e12}
    return next((peak for gpu, peak in peaks.items() if gpu in name), math.nan)


def machine_name(device) -> str:
    """Return a run's hardware and PyTorch, in words: resuming is exact only on the same."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"{os.environ.get('WORLD_SIZE', '1')} x {device} ({name}), torch {torch.__version__}"


def git_commit() -> str:
    """Return the commit of this repository, with -dirty if files have changed since; nothing outside git."""
    command = "git --git-dir=.git describe --always --dirty --exclude=* --abbrev=10"  # not of a repository around it
    with suppress(OSError):
        return subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return ""


class Loss(torch.nn.Module):
    """A model's loss alone, to compile: code that also returned the logits would compute a gradient for them."""

    def __init__(self, model, compile):
        super().__init__()
        self.model = model
        self.forward = torch.compile(self.loss) if compile else self.loss

    def loss(self, x, y):
        return self.model(x, y)[1]


def capture(loss_of, x, y):
    """Return a Loss that runs as CUDA graphs, for batches like (x, y), and True; or the Loss as it is, and False.

    Python takes longer to start a small model's kernels than they run; a graph starts them all at once. It leaves
    gradients in memory of its own, which the next replay overwrites. So there must always be gradients to add them to:
    never set them to None. Otherwise a parameter takes that memory as its gradient, and accumulates in it.
    """
    try:
        graphed = torch.cuda.make_graphed_callables(loss_of, (x, y), allow_unused_input=True)
    except Exception as error:  # an edit of model.py that waits for the GPU, as .item() does
        print0(f"NOTE    no CUDA graphs, since this model cannot be captured: {str(error):.150}")
        return loss_of, False
    for parameter in loss_of.parameters():
        if parameter.requires_grad:  # AdamW would let a frozen one with a gradient decay
            parameter.grad = torch.zeros_like(parameter)
    return graphed, True


class StopSignal:
    """Remember the `number` of a Ctrl-C, or of what a cluster sends, so that a run can finish its step, save and leave.

    A second one ends the program at once, but not under torchrun, which sends SIGTERM after a second Ctrl-C.
    """

    number = 0  # no signal yet

    def listen(self, handler=None):
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):  # Windows has only two of them
            number = getattr(signal, name, None)
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it on purpose
                signal.signal(number, self.remember if handler is None else handler)

    def remember(self, number, frame):
        self.number = number
        self.listen(signal.SIG_IGN if "RANK" in os.environ else signal.SIG_DFL)


def newest_run() -> str:
    """Return the folder below out/ that has the newest checkpoint."""
    saved = [path for name in ("ckpt.pt", "best.pt") for path in glob(f"out/**/{name}", recursive=True)]
    saved = [path for path in saved if not Path(path).with_name("lock").exists()]  # which marks a run of compare.py
    if not saved:
        raise UserError("out/ holds no run: train one first, or name one with --out_dir=FOLDER")
    return os.path.dirname(max(saved, key=os.path.getmtime))


def find_checkpoints(folder) -> dict:
    """Return {path: time of its last change} of a run's checkpoints: best.pt and ckpt.pt, if they exist."""
    paths = [Path(folder, name) for name in ("best.pt", "ckpt.pt")]
    return {path: path.stat().st_mtime_ns for path in paths if path.exists()}


def load_checkpoint(folder, best=False) -> dict:
    """Return a checkpoint, on the CPU, and its "path". No code in it is run.

    It is ckpt.pt or, if `best`, best.pt; if that is missing, the other. A `folder` that ends in .pt is the checkpoint.
    """
    paths = [Path(folder)] if str(folder).endswith(".pt") else sorted(find_checkpoints(folder), reverse=not best)
    if not paths:
        raise UserError(f"{folder} holds no checkpoint: name the folder of a run")
    with open(paths[0], "rb") as file:
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # damaged bytes raise all sorts of errors
            checkpoint = None
    if not isinstance(checkpoint, dict) or checkpoint.get("version") != VERSION:
        raise UserError(f"{paths[0]}: damaged, or not a checkpoint of this version of train.py")
    return checkpoint | {"path": str(paths[0])}


def open_log(path, checkpoints, iter_num, evaluates):
    """Open a run's log, lock it for this process, and cut it back to the checkpoint at step iter_num.

    The evaluation at that step is cut, too, if the run `evaluates` again. Lines that are not JSON, as a power cut may
    leave, are cut if no good one follows. `checkpoints` are those found before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab", buffering=0)
    if not file_lock(file):
        raise UserError(f"{path.parent}: another process is training there: wait, or choose another --out_dir")
    if find_checkpoints(path.parent) != checkpoints:  # by one that has ended since this one looked
        raise UserError(f"{path.parent}: another process has just trained there: run the command again")
    end = position = 0
    for line in path.read_bytes().splitlines(keepends=True) if iter_num else []:
        position += len(line)
        with suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            repeated = evaluates and entry["event"] in ("eval", "end")
            if entry["step"] > iter_num or entry["step"] == iter_num and repeated:
                break
            end = position if line.endswith(b"\n") else end
    file.truncate(end)
    return file
