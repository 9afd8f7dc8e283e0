"""A run: its settings, how it starts or resumes, and its folder, with a lock, a log and checkpoints."""

import json
import math
from pathlib import Path

import torch

from config import check_range
from config.runtime import checkpoints
from config.runtime.checkpoints import SHAPE, build_model, make_config
from config.runtime.program import (
    UserError,
    atomic_write,
    command,
    file_errors,
    file_lock,
    held,
    import_optional,
    print0,
    rank,
    world_size,
)
from model import GPT

# settings that a run's folder is named after
METHOD = ("attention", "qk_scale", "w2_score", "sigma", "residual", "keep_input")
# settings that a resumed run may change; with any other it would be a different run
MAY_CHANGE = {"out_dir", "init_from", "eval_only", "max_iters", "device", "compile"}
MAY_CHANGE |= {"checkpoint_interval", "eval_interval", "log_interval", "wandb"}

CHOICES = {  # of settings that are not the model's
    "init_from": ("scratch", "resume", "auto", "run:FOLDER"),
    "lr_decay": ("cosine", "linear", "none"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "true", "false"),
}

# options that have no effect with certain values of other settings
NO_EFFECT = {
    "qk_scale": {"attention=standard", "attention=w2"},
    "w2_score": {"attention=standard", "attention=summed_qk"},
    "sigma": {"attention=standard", "attention=summed_qk", "w2_score=overlap"},
    "keep_input": {"residual=standard"},
}


# -- the folder: one process writes to it, and ends if it cannot


class Run:
    """The folder of a run, locked for this process, with its log, of which it keeps the lines up to step iter_num.

    Only the first of several processes writes to it.
    """

    def __init__(self, folder, iter_num, settings):
        self.folder, self.log_path = folder, folder / "log.jsonl"
        if rank() != 0:
            return
        with file_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self.log_file = held.enter_context(open(self.log_path, "ab", buffering=0))
            if not file_lock(self.log_file):
                cure = "wait for it, or choose another --out_dir"
                raise UserError(f"{folder}: another process is training there: {cure}")
            self.log_file.truncate(end_of_log(self.log_path, iter_num))
        self.track = start_tracker(self.folder, iter_num, settings)

    def log(self, event, step, **facts):
        """Write a line of JSON, which has no inf and nan: they are null."""
        if rank() != 0:
            return
        numbers = {name: fact for name, fact in facts.items() if isinstance(fact, int | float)}
        facts |= {name: None for name, number in numbers.items() if not math.isfinite(number)}
        line = json.dumps({"event": event, "step": step, **facts}).encode() + b"\n"
        with file_errors(self.log_path):
            while line:  # on a full disk only a part of it is written, and an error comes with the next part
                line = line[self.log_file.write(line) :]
        self.track({f"{event}/{name}": number for name, number in numbers.items()}, step)

    def save(self, name, state):
        """Write a checkpoint. If that fails, the previous one stays as it is."""
        if rank() != 0:
            return
        with file_errors(self.folder / name), atomic_write(self.folder / name) as file:
            torch.save({"version": checkpoints.VERSION, **state}, file)

    def resume_command(self, max_iters):
        resume = command("train.py", "--init_from=resume", f"--out_dir={self.folder}", f"--max_iters={max_iters}")
        program = f"torchrun --standalone --nproc_per_node={world_size()}" if world_size() > 1 else "python"
        return resume.replace("python", program, 1)


def end_of_log(path, iter_num) -> int:
    """Return where the last line up to step iter_num ends: later steps will run again."""
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if iter_num else []:
        if not line.endswith(b"\n") or json.loads(line)["step"] > iter_num:  # only the last line can be torn
            break
        end += len(line)
    return end


def start_tracker(folder, iter_num, settings):
    """Return a function (numbers, step) -> None: that of Weights & Biases if the settings ask for it."""
    if not settings["wandb"]:
        return lambda numbers, step: None
    wandb = import_optional("wandb")
    ids = [path.stem[4:] for path in sorted(folder.glob("wandb/*/run-*.wandb"))]
    same = {"id": ids[-1], "resume": "allow"} if ids and iter_num else {}  # it goes on as the same run there
    try:
        run = wandb.init(name=folder.name, config=settings, dir=folder, **same)
    except wandb.Error as error:  # no key, no network
        raise UserError(f"wandb: {error} To log into the run's folder alone, set WANDB_MODE=offline") from None
    held.callback(run.finish)
    return run.log


# -- its settings


def check_settings(settings, world_size):
    """Raise a UserError for a setting that cannot work, before anything is read, written or downloaded."""
    of_another = settings["init_from"].startswith("run:")
    settings["compile"] = settings["compile"].lower()  # True and False are typed as for a switch
    for name, choices in CHOICES.items():
        if settings[name] not in choices and not (name == "init_from" and of_another):
            raise UserError(f"{name} = {settings[name]!r} is invalid: it must be one of {', '.join(choices)}")
    check_range(settings, "batch_size grad_accum_steps max_iters checkpoint_interval eval_tokens log_interval", 1)
    check_range(settings, "seed eval_interval warmup_iters learning_rate min_lr_frac weight_decay grad_clip", 0)
    check_range(settings, "beta1 beta2", 0, 1)
    if settings["grad_accum_steps"] % world_size and not settings["eval_only"]:
        shared = f"it must be a multiple of {world_size}, the number of processes"
        raise UserError(f"grad_accum_steps = {settings['grad_accum_steps']} is invalid: {shared}")
    if settings["wandb"]:
        import_optional("wandb")
    from_there = SHAPE if of_another else set()
    make_config({name: value for name, value in settings.items() if name not in from_there})


def ineffective_settings(settings, given):
    """Return a line for each given setting that has no effect."""
    lines = []
    values = {f"{name}={value}" for name, value in settings.items()}
    for name, value in given.items():
        for other in values & NO_EFFECT.get(name, set()):
            lines.append(f"{name} = {value!r} has no effect with {other}")
        if name in SHAPE and value != settings[name]:
            lines.append(f"{name} = {value!r} has no effect: {settings['init_from']} has {settings[name]!r}")
    return lines


# -- how a run starts, or resumes


def run_folder(settings, defaults, argv) -> Path:
    config_files = [Path(argument).stem for argument in argv if not argument.startswith("-")]
    method = [name for name in METHOD if settings[name] != defaults[name]]
    options = [name if settings[name] is True else settings[name] for name in method]
    name = settings["out_dir"] or "out/" + "-".join(config_files or [Path(settings["dataset"]).name, *options])
    return Path(name)


def begin(folder, defaults, given):
    """Return the settings of a run and, if it resumes, the checkpoint to resume from, else None."""
    settings = defaults | given
    checkpoint, requested = None, settings["init_from"]
    resuming = requested == "resume" or requested == "auto" and checkpoints.find(folder).exists()
    if requested == "auto":
        settings["init_from"] = "scratch"
    if resuming:
        checkpoint = checkpoints.load(checkpoints.find(folder, "best" if settings["eval_only"] else "latest"))
        settings = resumed_settings(checkpoint, given, defaults)
    check_settings(settings, world_size())
    if not resuming:
        check_folder(folder, settings)
    elif checkpoint["iter_num"] >= settings["max_iters"] and not settings["eval_only"]:
        reached = f"{checkpoint['path']} is at step {checkpoint['iter_num']}"
        if requested == "auto":
            print0(f"{reached}: nothing left to do")
            raise SystemExit(0)
        raise UserError(f"max_iters = {settings['max_iters']}, but {reached}: raise it to continue")
    return settings, checkpoint


@file_errors()
def check_folder(folder, settings):
    """Raise a UserError if the folder holds a run, or if there is nothing to start from, or to evaluate."""
    if settings["init_from"].startswith("run:"):
        checkpoints.find_source(settings["init_from"]).stat()
    if settings["eval_only"]:
        if settings["init_from"] == "scratch":
            cure = "add --init_from=resume, and the run's config or --out_dir"
            raise UserError(f"eval_only = True needs a trained model: {cure}")
    elif checkpoints.find(folder).exists():
        ways = "--init_from=resume continues it, --out_dir=FOLDER leaves it alone; or remove the folder"
        raise UserError(f"{folder} already holds a run: {ways}")


def resumed_settings(checkpoint, given, defaults):
    """Return the run's settings (the default where it has none), updated by given ones that may change."""
    settings = {name: checkpoint["settings"].get(name, default) for name, default in defaults.items()}
    settings |= {name: defaults[name] for name in ("out_dir", "eval_only")}
    ignored = {"init_from"} | (SHAPE if settings["init_from"].startswith("run:") else set())
    ignored |= {name for name in ("dtype", "compile") if given.get(name) == "auto"}  # the run keeps what that was
    may_change = MAY_CHANGE | ({"dataset", "batch_size", "dtype"} if given.get("eval_only") else set())
    changes = {name: value for name, value in given.items() if name not in ignored and value != settings[name]}
    fixed = [f"{name} = {changes[name]!r} (was {settings[name]!r})" for name in changes if name not in may_change]
    if fixed:
        raise UserError(f"{checkpoint['path']} was trained with other settings: leave out {', '.join(fixed)}")
    return settings | changes


def resumed_model(checkpoint, settings, data) -> GPT:
    """Return the model of a checkpoint. Raise a UserError for data that it was not trained on, or cannot evaluate."""
    path, trained_on = checkpoint["path"], checkpoint["data"]
    if settings["eval_only"]:
        checkpoints.check_tokens(data, checkpoint["tokenizer"], path, f"run:{path.parent}")
    elif data.meta["sha256"] != trained_on["sha256"] or data.tokenizer.state() != checkpoint["tokenizer"]:
        cure = f"prepare {trained_on['source']} again"
        raise UserError(f"{path} was not trained on {data.folder}: {cure}")
    return build_model(checkpoint)


def resume_notes(checkpoint, settings, machine, code):
    if settings["eval_only"]:
        return checkpoints.code_notes(checkpoint, code, ["model.py"])
    lines = checkpoints.code_notes(checkpoint, code)
    steps, steps_were = settings["max_iters"], checkpoint["settings"]["max_iters"]
    if steps_were != steps and settings["lr_decay"] != "none":
        lines.append(f"max_iters = {steps} (was {steps_were}): the learning rate decays until then, so it jumps")
    if checkpoint["machine"] != machine:
        lines.append(f"resuming on {machine} instead of {checkpoint['machine']}: results will not match bit for bit")
    return lines
