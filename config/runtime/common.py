"""Code that all programs share: one-line errors, signals, atomic writes, locks, devices, dtypes."""

import atexit
import hashlib
import math
import os
import signal
import sys
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

import config.runtime.waiting  # before PyTorch, which reads what it decides
import torch
import torch.distributed as dist

from data.tokenizer import TokenizerError
from model import ConfigError

# -- errors, and the end of a program --------------------------------------------------------------------------


class UserError(ValueError):
    """A mistake in settings, files or data that the project itself has found: what is wrong, and what would work.

    Programs show it as one line. Every other error keeps its traceback: a slip in model.py may have raised it.
    """

    exit_code = 2


class FolderInUse(UserError):
    """Another process trains in the folder of the run."""

    exit_code = 3


@contextmanager
def file_errors():
    """Raise a UserError that names the file for an OSError inside."""
    try:
        yield
    except OSError as error:
        named = error.filename is not None and error.strerror
        raise UserError(f"{error.filename}: {error.strerror}" if named else error) from error


def rank() -> int:
    return int(os.environ.get("RANK", 0))  # torchrun sets it


def print0(line):
    """Print a line on the first process. A full disk or a closed terminal is no reason to lose a run."""
    if rank() == 0:
        with suppress(OSError):
            print(line, flush=True)


def install_excepthook():
    """Show users' mistakes as one line on stderr from here on."""
    sys.excepthook = report_error
    for stream in filter(None, (sys.stdout, sys.stderr)):  # text is UTF-8, on any terminal and in any pipe
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def report_error(kind, error, traceback):
    code, line = 1, ""
    if issubclass(kind, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    elif issubclass(kind, (UserError, ConfigError, TokenizerError)):  # the last two: from files that people copy
        code, line = getattr(error, "exit_code", 2), " ".join(str(error).splitlines())
    elif issubclass(kind, torch.OutOfMemoryError):
        code, line = 2, f"the GPU ran out of memory: use smaller sizes ({str(error).partition('. ')[0]})"
    else:
        sys.__excepthook__(kind, error, traceback)
    if line:
        process = f" (process {rank()})" if rank() else ""
        print(f"{Path(sys.argv[0]).name}: error{process}: {line}", file=sys.stderr)
    exit_program(code)


def exit_program(code=0):
    together = dist.is_initialized()
    if together:
        atexit._run_exitfuncs()  # of the trackers
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # a full disk or a closed terminal, reported before
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if together:  # the interpreter's shutdown would be aborted by a waiting thread of gloo
        os._exit(code)
    raise SystemExit(code)


def quiet_pipe():
    """Let `| head` end the program silently."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class StopSignal:
    """Remember the `number` of a Ctrl-C, SIGTERM or SIGHUP, so that a run can finish its step, save and leave.

    A second signal ends the program at once, but not under torchrun, whose processes get a terminal's Ctrl-C twice.
    """

    def __init__(self):
        self.number = 0  # no signal yet
        self.listen(self.remember)

    def remember(self, number, frame):
        self.number = number
        self.listen(signal.SIG_IGN if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_DFL)

    def listen(self, handler):
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it on purpose
                signal.signal(number, handler)


def clock(seconds):
    """Return 75 as "1:15", 3700 as "1:01:40"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


# -- files, locks, checkpoints -------------------------------------------------------------------------------

CHECKPOINT_VERSION = 8  # of the layout of a checkpoint


@contextmanager
def atomic_write(path):
    """Yield a binary file to write, NAME.tmp until it is whole. If anything fails, `path` stays as it was."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # rather than the temporary one
        raise


@file_errors()
def find_checkpoint(folder, prefer="latest"):
    """Return the path of ckpt.pt ("latest") or best.pt ("best") of a run, or the other one if only that exists."""
    latest, best = folder / "ckpt.pt", folder / "best.pt"
    preferred, other = (best, latest) if prefer == "best" else (latest, best)
    return other if other.exists() and not preferred.exists() else preferred


def source_checkpoint(name):
    """Return the path of the checkpoint that run:FOLDER names."""
    return find_checkpoint(Path(os.path.expanduser(name.removeprefix("run:"))), prefer="best")


FORM = {"iter_num": int, "val_loss": float, "settings": dict, "config": dict, "data": dict, "tokenizer": dict}
FORM |= {"machine": str, "code": dict, "model": dict, "optimizer": dict, "scaler": dict}


@file_errors()
def load_checkpoint(path) -> dict:
    """Return a whole checkpoint, on the CPU, and its "path". No code in it is run."""
    checkpoint = None
    with open(path, "rb") as file, suppress(Exception):  # damaged bytes raise all sorts of errors
        if zipfile.ZipFile(file).testzip() is None:  # torch.load does not look at the checksums in it
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    version = checkpoint.get("version") if isinstance(checkpoint, dict) else None
    if version is not None and version != CHECKPOINT_VERSION:
        raise UserError(f"{path}: checkpoint version {version!r}; this program reads version {CHECKPOINT_VERSION}")
    if version is None or not all(isinstance(checkpoint.get(name), kind) for name, kind in FORM.items()):
        other = path.with_name("best.pt" if path.name == "ckpt.pt" else "ckpt.pt")
        cure = f"; move it away to use {other}" if other.exists() else ""
        raise UserError(f"{path}: damaged, or not a checkpoint of train.py{cure}")
    return checkpoint | {"path": path}


def shapes_of(weights) -> dict:
    return {name: getattr(tensor, "shape", None) for name, tensor in weights.items()}


def check_weights(found, expected, problem):
    """Raise a UserError, which begins with the `problem`, unless two state dicts have the same names and shapes."""
    here, there = shapes_of(expected), shapes_of(found)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            sizes = f"expected {here.get(name, 'nothing')}, found {there.get(name, 'nothing')}"
            raise UserError(f"{problem}: {name}: {sizes}")


def file_lock(file, wait=False) -> bool:
    """Return whether this process now holds the lock of an open file. Where there are no locks, every process does."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows; a file system without locks
        pass
    return True


@contextmanager
def folder_lock(folder):
    """Yield whether this process holds the lock of a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        yield True
        return
    try:
        yield file_lock(descriptor)
    finally:
        os.close(descriptor)


@file_errors()
def read_text(path) -> str:
    """Return the text of a UTF-8 file, with its own line ends: the same text on every system."""
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")  # the byte-order mark of some editors
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -- devices and dtypes --------------------------------------------------------------------------------------


def pick_device(device) -> torch.device:
    """Return the device of that name, or for "auto" the best one here: cuda, mps or cpu."""
    mps = ["mps"] if torch.backends.mps.is_available() else []
    here = [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), *mps, "cpu"]
    name = {"auto": here[0], "cuda": "cuda:0"}.get(device, device)
    if name not in here:
        raise UserError(f"device = {device!r} is not available: this machine has {', '.join(here)}")
    return torch.device(name)


def peak_flops(device) -> float:
    """Return the dense bfloat16 peak of a GPU in FLOP/s, from its maker's data sheet; nan where unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "L40S": 362e12, "A100": 312e12, "RTX 4090": 165e12}
    return next((peak for gpu, peak in peaks.items() if gpu in name), math.nan)


def pick_dtype(dtype, device) -> torch.dtype:
    """Return the type of that name, or for "auto" bfloat16 where `device` multiplies it fast, else float32."""
    if dtype == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            known = device.type == "cpu" and hasattr(torch.cpu, "get_capabilities")
            fast = known and torch.cpu.get_capabilities().get("avx512_bf16")  # CPUs with AMX have it too
        dtype = "bfloat16" if fast else "float32"
    if device.type == "mps" and dtype != "float32":  # reported for PyTorch's causal attention
        raise UserError(f"dtype = {dtype!r} does not work on mps, where 16-bit types may leak the future: use float32")
    return getattr(torch, dtype)


def pick_compile(device, flops) -> bool:
    """Return whether compiling pays off for this many operations: on a GPU, and on a CPU from ten minutes up.

    A core computes about 50 GFLOP/s. Compiling takes about 40 seconds there, and makes steps 1.2 to 1.4 times as fast.
    """
    return device.type == "cuda" or device.type == "cpu" and flops > 600 * 50e9 * torch.get_num_threads()


def pick_attention_kernel(model, device, dtype):
    """Select the faster of PyTorch's attention kernels for `model`, for this process.

    On a CPU the fused kernel computes in float32. At short contexts plain products in bfloat16 are up to twice as fast,
    most of all where score vectors are wide. But they hold T x T weights until the backward pass.
    """
    wide = model.blocks[-1].attn.score_width() > 3 * model.config.head_dim
    short = model.config.block_size <= (1024 if wide else 512)
    use_plain_attention(device.type == "cpu" and dtype == torch.bfloat16 and short)


def use_plain_attention(plain):
    """Switch PyTorch's fused attention off, or on. Both switches work on CPUs too, whatever their names say."""
    torch.backends.cuda.enable_flash_sdp(not plain)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(plain)


def machine_name(device, world_size=1):
    """Return a run's hardware and PyTorch, in words: bit-exact resuming requires the same."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    processes = f"{world_size} x " if world_size > 1 else ""
    return f"{processes}{device} ({name}), torch {torch.__version__}"
