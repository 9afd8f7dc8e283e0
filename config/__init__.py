"""Settings: what a program declares at its top, changed by config files, changed by the command line.

A program declares its settings as plain assignments above the line that reads them:

    max_iters = 2000  # optimizer steps
    dropout = 0.0     # share of activations dropped in training
    settings = read_settings(__file__)

and is run as `python train.py config/m1_shakespeare.py --max_iters=200`. The type of a setting is the
type of its default (str, bool, int or float); a name or a value that does not fit is an error, never a guess.
"""

import argparse
import ast
import difflib
import io
import math
import os
import runpy
import signal
import sys
import tokenize
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch

BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


# -- errors for people ---------------------------------------------------------------------------------------


def fail(message) -> NoReturn:
    """Print `<program>: error: <message>` as one line on stderr and exit with code 2."""
    line = " ".join(str(message).splitlines())
    rank = int(os.environ.get("RANK", 0))
    process = f" (process {rank})" if rank else ""
    print(f"{Path(sys.argv[0]).name}: error{process}: {line}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def user_errors():
    """Turn what users can mend into `fail`: a ValueError, an OSError or an ImportError raised inside, too little
    memory, and Ctrl-C."""
    try:
        yield
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error)
    except (ValueError, ImportError) as error:
        fail(error)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except (MemoryError, RuntimeError, TypeError) as error:
        if torch.distributed.is_available():
            if isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower():
                fail("another process of this run has ended; --init_from=resume goes on from the last checkpoint")
        # torch.OutOfMemoryError is a GPU's; a CPU's, and sizes whose product overflows, have no type of their own
        of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
        if not of_memory and "overflow" not in str(error).lower():
            raise
        fail(f"more memory is needed than there is: use smaller sizes ({shorten(str(error).splitlines()[0], 120)})")


def quiet_pipe():
    """Let `| head` end the program without a word."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors and no abbreviated options, for programs that take other things than settings."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        fail(message)


# -- settings ------------------------------------------------------------------------------------------------


@dataclass
class Setting:
    default: str | bool | int | float
    comment: str


@user_errors()
def read_settings(program, argv=None) -> dict:
    """The settings of `program` (its `__file__`): defaults <- config files, in order <- `--name=value` options.

    A bare `--name` turns a bool on. `--help` prints every setting and exits.
    """
    argv = sys.argv[1:] if argv is None else argv
    declared = declared_settings(program)
    if "--help" in argv or "-h" in argv:
        quiet_pipe()
        print(usage(program, declared))
        raise SystemExit(0)

    files = [argument for argument in argv if not argument.startswith("-")]
    options = {}
    for argument in argv:
        if argument.startswith("-"):
            name, value = parse_option(argument, declared)
            options[name] = value

    settings = {name: setting.default for name, setting in declared.items()}
    for path in files:
        settings |= read_file(find_file(path, program), declared)
    return settings | options


def declared_settings(program) -> dict[str, Setting]:
    """The literal assignments (and the comments beside them) above the call of `read_settings` in a script."""
    source = Path(program).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}

    declared = {}
    for statement in ast.parse(source).body:
        calls = (ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call))
        if any(call.split(".")[-1] == "read_settings" for call in calls):
            break
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.islower() and not name.startswith("_"):
                try:
                    default = ast.literal_eval(value)
                except ValueError:  # computed, so not a setting
                    continue
                if type(default) in (str, bool, int, float):
                    declared[name] = Setting(default, comments.get(statement.end_lineno, ""))
    return declared


def parse_option(argument, declared):
    """`--name=value` (or `--name`, for a bool) as the setting's name and its converted value."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if name not in declared:
        raise ValueError(f"{argument.partition('=')[0]}: {unknown(name, declared)}")
    default = declared[name].default
    if not equals and not isinstance(default, bool):
        raise ValueError(f"{argument}: write it as --{name}=value")
    try:
        return name, convert(text if equals else "true", default)
    except ValueError as error:
        raise ValueError(f"--{name}: {error}") from None


def find_file(path, program) -> Path:
    """A config file, looked for from the current folder and then from the program's, so that runs work anywhere."""
    home = Path(program).resolve().parent
    if path.endswith(".pt") or Path(path).is_dir() and any(Path(path).glob("*.pt")):
        raise ValueError(f"{path}: not a config file; a run is named by --out_dir=FOLDER")
    for candidate in (Path(path), home / path):
        if candidate.is_file():
            if candidate.suffix != ".py":  # other files could be taken for programs too, such as a zip
                raise ValueError(f"{path}: not a config file, whose name would end in .py")
            if candidate.samefile(program):
                raise ValueError(f"{path}: is the program itself, not a config file")
            return candidate
    known = {file.stem: file.relative_to(home) for file in home.glob("config/[!_]*.py")}
    stem = Path(path).stem or "?"
    near = difflib.get_close_matches(stem, known, n=1) or [name for name in sorted(known) if name.startswith(stem)]
    hint = f"did you mean {known[near[0]]}?" if near else "settings are written as --name=value"
    raise ValueError(f"{path}: no such config file ({hint})")


def read_file(path, declared) -> dict:
    """Run a config file; its public names, functions, classes and modules apart, are settings."""
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # a config file is a program and can fail like one
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f"{path}, line {line}" if line else f"{path}"
        what = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{where}: {type(error).__name__}: {what}") from None

    settings = {}
    for name, value in names.items():
        if name.startswith("_") or callable(value) or isinstance(value, ModuleType):
            continue
        if name not in declared:
            raise ValueError(f"{path}: {unknown(name, declared)}")
        try:
            settings[name] = convert(value, declared[name].default)
        except ValueError as error:
            raise ValueError(f"{path}: {name}: {error}") from None
    if not settings:
        raise ValueError(f"{path}: sets nothing; settings are written as name = value")
    return settings


def unknown(name, declared):
    near = difflib.get_close_matches(name, declared, n=1)
    return f"unknown setting {name!r} ({f'did you mean {near[0]}?' if near else '--help lists all settings'})"


def convert(value, default):
    """`value`, from a config file or as text from the command line, in the type of `default`.

    >>> convert("1e3", 2000), convert(0, 0.1), convert("off", True), convert(False, "auto")
    (1000, 0.0, False, 'false')
    """
    kind = type(default)
    if isinstance(value, (str, bool, int, float)):
        if kind is str:
            return str(value).lower() if isinstance(value, bool) else str(value)
        if kind is bool and str(value).lower() in BOOLS:
            return BOOLS[str(value).lower()]
        if kind in (int, float) and not isinstance(value, bool):
            try:
                if kind is int and not isinstance(value, float) and abs(int(value)) < 2**63:
                    return int(value)
            except ValueError:  # text, perhaps of the form 1e3
                pass
            try:
                number = float(value)
            except (ValueError, OverflowError):
                number = math.nan
            if math.isfinite(number) and (kind is float or number.is_integer() and abs(number) < 2**63):
                return kind(number)
    wanted = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number"}[kind]
    raise ValueError(f"{wanted} is needed, not {shorten(repr(value))}")


def check_range(settings, names, low, high=math.inf):
    """ValueError for the first of the settings `names` (separated by spaces) that is not in [low, high)."""
    for name in names.split():
        if not low <= settings[name] < high:
            below = f", below {high}" if high < math.inf else ""
            raise ValueError(f"{name} = {settings[name]} does not work: it must be {low} or more{below}")


def shorten(text, length=80):
    return text if len(text) <= length else text[:length] + "..."


def usage(program, declared) -> str:
    """The text of `--help`."""
    rows = [(f"--{name}={s.default}", type(s.default).__name__, s.comment) for name, s in declared.items()]
    width = max((len(row[0]) for row in rows), default=0)
    lines = [f"  {option:{width}}  {kind:5}  {comment}".rstrip() for option, kind, comment in rows]
    head = f"usage: python {Path(program).name} [config.py ...] [--name=value ...]"
    return "\n".join([head, "", "settings, their defaults and types:", *lines])


# -- devices -------------------------------------------------------------------------------------------------


def pick_device(device) -> torch.device:
    """The device of that name, or for "auto" the best one here: cuda, mps or cpu. ValueError if it is not here."""
    here = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    here += ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    if device == "auto":
        device = here[0]
    name = "cuda:0" if device == "cuda" else device
    if name not in here:
        raise ValueError(f"device = {device!r} is not here: this machine has {', '.join(here)}")
    return torch.device(name)


def pick_dtype(dtype, device) -> torch.dtype:
    """The type of that name to compute in, or for "auto" bfloat16 where `device` multiplies it fast, else float32."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            known = device.type == "cpu" and hasattr(torch.cpu, "get_capabilities")
            fast = known and torch.cpu.get_capabilities().get("avx512_bf16")  # CPUs with AMX have it too
        dtype = "bfloat16" if fast else "float32"
    if dtype not in names:
        raise ValueError(f"dtype = {dtype!r} does not work: it must be auto, {', '.join(names)}")
    return names[dtype]


def pick_attention_kernel(model, device, dtype):
    """Select, for this process, the faster of PyTorch's kernels for the attention of `model`.

    On a CPU the fused kernel computes in float32. Plain products in bfloat16 are up to twice as fast at short
    contexts, and gain the most where score vectors are wide, but hold T x T weights until the backward pass.
    """
    wide = model.blocks[-1].attn.score_width() > 3 * model.config.head_dim
    short = model.config.block_size <= (1024 if wide else 512)
    use_plain_attention(device.type == "cpu" and dtype == torch.bfloat16 and short)


def use_plain_attention(plain):
    """Both switches are about CPUs too, whatever their names say."""
    torch.backends.cuda.enable_flash_sdp(not plain)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(plain)


# -- processes -----------------------------------------------------------------------------------------------


def meet(device, rank, world) -> torch.device:
    """Join the other processes that torchrun has started; returns the device, of the kind of `device`, for this one."""
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device = {device.type!r} does not work with {world} processes: it must be cuda or cpu")
    if device.type == "cuda":
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    store, _, _ = next(torch.distributed.rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # which outlives the processes: started again, they would find the addresses of those that have died
        store = torch.distributed.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world)
    return device


def spread(model, how, device):
    """The `model` as the processes train it together on `device`: what to call in its place. `how` is ddp or fsdp.

    With fsdp each process keeps a share of every parameter, except of those that are single numbers, whose
    gradients it is for the caller to add up.
    """
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model.to(device))
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing is written into these views
    mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    numbers = {p for p in model.parameters() if p.dim() == 0}
    for p in numbers:
        p.data = p.data.to(device)  # fully_shard moves the rest, block by block, since a device may not hold it whole
    for block in model.blocks:
        # a layer that later ones replay stays put together until then
        fully_shard(block, mesh=mesh, reshard_after_forward=block.recomputed is None, ignored_params=numbers)
        for method in ("scores", "replay"):  # what is called from outside of the block's own forward
            register_fsdp_forward_method(block, method)
    return fully_shard(model, mesh=mesh, ignored_params=numbers)


def spread_like(parameter, tensor):
    """A whole tensor, such as an optimizer keeps for a parameter, as `spread` has spread the parameter."""
    if not hasattr(parameter, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(parameter.device)
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)  # all have it


def whole(tensor):
    """A tensor, put together where `spread` has spread it; all processes must ask at once."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_state(state, keep):
    """A dict of tensors, or of such dicts, put together: one tensor at a time, on the CPU, and only where `keep` is
    True, since no device may hold them all; all processes must ask at once."""
    if isinstance(state, dict):
        return {name: whole_state(value, keep) for name, value in state.items()}
    if not hasattr(state, "full_tensor"):
        return state
    tensor = whole(state)
    return tensor.cpu() if keep else None
