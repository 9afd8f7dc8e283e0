"""What every program here needs: errors for people, signals, whole files, locks, devices and dtypes."""

import atexit
import hashlib
import math
import os
import signal
import sys
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from data.tokenizer import TokenizerError
from model import ConfigError

# -- errors, and the end of a program --------------------------------------------------------------------------


class UserError(ValueError):
    """A mistake in settings, files or data, which the project itself has found: what is wrong, and what would work.

    The programs show it as one line and end with exit code 2. Every other error keeps its traceback, whatever its
    type: it may have been raised by a line of model.py that somebody has just written.
    """


@contextmanager
def file_errors():
    """Raise a UserError, which names the file, for an OSError of the files that are read or written inside."""
    try:
        yield
    except OSError as error:
        named = error.filename is not None and error.strerror
        raise UserError(f"{error.filename}: {error.strerror}" if named else error) from error


def print0(line):
    """Print a line, on the first of several processes. A full disk or a closed terminal is no reason to lose a run."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print(line, flush=True)


def install_excepthook():
    """End the program, from here on, in one line on stderr and exit code 2 where the project itself finds a mistake.

    It raises a UserError, or, in the files that are also used by themselves, a ConfigError or a TokenizerError. Ctrl-C
    ends the program without a word. Every other error keeps its traceback and ends the program with exit code 1.
    """
    sys.excepthook = report_error
    for stream in filter(None, (sys.stdout, sys.stderr)):  # text is UTF-8, on any terminal and in any pipe
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def report_error(kind, error, traceback):
    """Serve as Python's sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    elif issubclass(kind, (UserError, ConfigError, TokenizerError)):
        line = " ".join(str(error).splitlines())
        process = f" (process {os.environ['RANK']})" if os.environ.get("RANK", "0") != "0" else ""
        print(f"{Path(sys.argv[0]).name}: error{process}: {line}", file=sys.stderr)
        code = 2
    else:
        sys.__excepthook__(kind, error, traceback)
        code = 1
    exit_program(code)


@contextmanager
def resource_errors():
    """Raise a UserError where PyTorch runs out of memory inside, or loses another process of the run.

    On a CPU neither has a type of its own, so those of PyTorch's messages are known that say so.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError, a GPU's, is one of these
        text = str(error)
        out_of_memory = ("DefaultCPUAllocator: can't allocate memory", "Storage size calculation overflowed")
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in text for words in out_of_memory):
            short = (text.splitlines() or [""])[0][:120]
            raise UserError(f"more memory is needed than there is: use smaller sizes ({short})") from error
        if isinstance(error, getattr(dist, "DistError", ())) or "gloo/transport" in text:
            cure = "--init_from=auto goes on from the last checkpoint"
            raise UserError(f"another process of this run has ended; {cure}") from error
        raise


def exit_program(code=0):
    """End the program.

    One of several processes skips the interpreter's clearing up: there a thread of gloo that still waits for the
    interpreter would abort it ("terminate called without an active exception").
    """
    if dist.is_initialized():
        atexit._run_exitfuncs()  # such as those of trackers
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    raise SystemExit(code)


# -- pipes and signals ----------------------------------------------------------------------------------------


def quiet_pipe():
    """Let `| head` end the program without a word."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class StopSignal:
    """Remember the `number` of a Ctrl-C, SIGTERM or SIGHUP, so that a run can finish its step, save and leave.

    A second signal ends the program at once. Under torchrun it does not: there each process gets a terminal's Ctrl-C
    twice, from the terminal and from torchrun.
    """

    def __init__(self, pass_on=lambda: None):
        self.number, self.pass_on = 0, pass_on  # none so far; what else is to be done at once
        self.listen(self.remember)

    def remember(self, number, frame):
        self.number = number
        self.pass_on()
        self.listen(signal.SIG_IGN if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_DFL)

    def listen(self, handler):
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it, and means it
                signal.signal(number, handler)


def clock(seconds):
    """Return 75 as "1:15", 3700 as "1:01:40"."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


# -- files that are whole, and locks ----------------------------------------------------------------------------


CHECKPOINT_VERSION = 7  # of the layout of a checkpoint


@contextmanager
def atomic_write(path):
    """Yield a binary file to write. At the end it takes the place of `path`, whole, or not at all if anything fails.

    Until then it has a name in .tmp. What a killed process leaves by that name, the next one overwrites.
    """
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
    paths = [folder / "ckpt.pt", folder / "best.pt"]
    if prefer == "best":
        paths.reverse()
    return next((path for path in paths if path.exists()), paths[0])


@file_errors()
def load_checkpoint(path) -> dict:
    """Return what `save_checkpoint` wrote, on the CPU, if it is whole. No code in it is run."""
    checkpoint = None
    with open(path, "rb") as file, suppress(Exception):  # damaged bytes make the rest fail in all sorts of ways
        if zipfile.ZipFile(file).testzip() is None:  # torch.load does not look at the checksums in it
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or "version" not in checkpoint:
        other = path.with_name("best.pt" if path.name == "ckpt.pt" else "ckpt.pt")
        cure = f"; once it is moved away {other} takes its place" if other.exists() else ""
        raise UserError(f"{path}: damaged, or not a checkpoint of train.py{cure}")
    if checkpoint["version"] != CHECKPOINT_VERSION:
        raise UserError(f"{path}: of version {checkpoint['version']!r}; this program reads {CHECKPOINT_VERSION}")
    return checkpoint


def file_lock(file, wait=False) -> bool:
    """Return whether the open `file` is now this process's own: of all that ask for it, one holds it at a time.

    The system takes a lock away from a process that ends, however it ends. Where there are no locks, all get it.
    """
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
    """Yield whether the folder is this process's own, as `file_lock` does, until the end of the block."""
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
    """Return a UTF-8 file as it is: line ends stay, so that the same bytes are the same text on every system."""
    if Path(path).is_fifo():  # reading it could wait for ever
        raise UserError(f"{path}: not a file")
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")  # the mark some editors put in front
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -- what a run computes on, and in --------------------------------------------------------------------------


def pick_device(device) -> torch.device:
    """Return the device of that name, or for "auto" the best one here: cuda, mps or cpu."""
    mps = ["mps"] if torch.backends.mps.is_available() else []
    here = [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), *mps, "cpu"]
    name = {"auto": here[0], "cuda": "cuda:0"}.get(device, device)
    if name not in here:
        raise UserError(f"device = {device!r} is not here: this machine has {', '.join(here)}")
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
        raise UserError(f"dtype = {dtype!r} does not work on mps, where the future may leak in 16 bits: use float32")
    return getattr(torch, dtype)


def pick_compile(device, flops, threads=None) -> bool:
    """Say whether compiling pays for so many floating-point operations: on a GPU, and on a CPU from ten minutes up.

    A core computes some 50 GFLOP/s. Compiling takes some 40 seconds there, and makes steps 1.2 to 1.4 times as fast.
    `threads` are a CPU's; None: those of this process.
    """
    return device.type == "cuda" or device.type == "cpu" and flops > 600 * 50e9 * (threads or torch.get_num_threads())


def pick_attention_kernel(model, device, dtype):
    """Select, for this process, the faster of PyTorch's kernels for the attention of `model`.

    On a CPU the fused kernel computes in float32. Plain products in bfloat16 are up to twice as fast at short contexts.
    They gain the most where score vectors are wide, but hold T x T weights until the backward pass.
    """
    wide = model.blocks[-1].attn.score_width() > 3 * model.config.head_dim
    short = model.config.block_size <= (1024 if wide else 512)
    use_plain_attention(device.type == "cpu" and dtype == torch.bfloat16 and short)


def use_plain_attention(plain):
    """Switch PyTorch's fused attention off, or on. Both switches work on CPUs too, whatever their names say."""
    torch.backends.cuda.enable_flash_sdp(not plain)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(plain)


def machine_name(device, world_size=1):
    """Return what a run computes on: bit-exact resume needs the same again."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    processes = f"{world_size} x " if world_size > 1 else ""
    return f"{processes}{device} ({name}), torch {torch.__version__}"
