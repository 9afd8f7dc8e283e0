"""A run: its settings, how it starts or resumes, and its folder, with a lock, a log and checkpoints."""

import json
import math
import os
import re
from pathlib import Path

import torch

from config import check_range
from config.runtime import checkpoints, program
from config.runtime.processes import rank, world_size
from config.runtime.program import UserError, command, file_errors, print0

# settings that make a variant: in a folder's name, their values need no names
METHOD = ("attention", "qk_scale", "w2_score", "sigma", "residual", "keep_input")
# settings that a resumed run may change; with any other it would be a different run
MAY_CHANGE = {"out_dir", "init_from", "eval_only", "max_iters", "device", "graphs", "compile"}
MAY_CHANGE |= {"checkpoint_interval", "eval_interval", "log_interval"}
# what a new run chooses where a setting has this value, and a resumed one keeps
AUTO = {"dtype": "auto", "compile": "auto", "warmup_iters": 0}

# settings that always come from the model that another one begins from; its others may be changed
SHAPE = {"n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "bias", "rope_theta", "norm_eps", "tie_weights"}

CHOICES = {  # of settings that are not the model's
    "init_from": ("scratch", "resume", "auto", "run:FOLDER"),
    "lr_decay": ("cosine", "linear", "wsd", "none"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "true", "false"),
}

# options that have no effect with certain values of other settings
NO_EFFECT = {
    "residual": {"n_layer=1"},
    "qk_scale": {"attention=standard", "attention=w2"},
    "w2_score": {"attention=standard", "attention=summed_qk"},
    "sigma": {"attention=standard", "attention=summed_qk", "w2_score=overlap"},
    "keep_input": {"residual=standard", "n_layer=1"},
}


# -- the folder: one process writes to it, and ends if it cannot


class Run:
    """The folder of a run, locked for this process, with its log, of which it keeps the lines up to step iter_num.

    Only the first of several processes writes to it.
    """

    def __init__(self, settings, iter_num):
        self.folder = folder = Path(settings["out_dir"])
        self.log_path = folder / "log.jsonl"
        if rank() != 0:
            return
        with file_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self.log_file = program.held.enter_context(open(self.log_path, "ab", buffering=0))
            if not program.file_lock(self.log_file):
                cure = "wait for it, or choose another --out_dir"
                raise UserError(f"{folder}: another process is training there: {cure}")
            self.log_file.truncate(end_of_log(self.log_path, iter_num))

    def log(self, event, step, **facts):
        """Write a line of JSON, which has no inf and nan: they are null."""
        if rank() != 0:
            return
        for name, fact in facts.items():
            if isinstance(fact, float) and not math.isfinite(fact):
                facts[name] = None
        line = json.dumps({"event": event, "step": step, **facts}).encode() + b"\n"
        with file_errors(self.log_path):
            while line:  # on a full disk only a part of it is written, and an error comes with the next part
                line = line[self.log_file.write(line) :]

    def save(self, name, state):
        """Write a checkpoint. If that fails, the previous one stays as it is."""
        if rank() != 0:
            return
        with file_errors(self.folder / name), program.atomic_write(self.folder / name) as file:
            torch.save({"version": checkpoints.VERSION, **state}, file)

    def resume_command(self, max_iters):
        resume = command("train.py", "--init_from=resume", f"--out_dir={self.folder}", f"--max_iters={max_iters}")
        several = f"torchrun --standalone --nproc_per_node={world_size()}"
        return resume.replace("python", several, 1) if world_size() > 1 else resume


def end_of_log(path, iter_num) -> int:
    """Return where the last line up to step iter_num ends: later steps will run again."""
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if iter_num else []:
        if not line.endswith(b"\n") or json.loads(line)["step"] > iter_num:  # only the last line can be torn
            break
        end += len(line)
    return end


# -- how a run starts, or resumes


def begin(requested) -> tuple[dict, dict | None, bool]:
    """Return a run's final settings, the checkpoint that has its weights, or None, and whether it resumes there.

    Weights come from a run's own checkpoint if it resumes, from another run's with run:FOLDER, or else from scratch.
    """
    init_from, checkpoint = requested.values["init_from"], None
    if init_from.startswith("run:"):
        checkpoint = checkpoints.load(checkpoints.find_source(init_from))
    settings = new_settings(requested, checkpoint)
    folder = run_folder(settings, requested, checkpoint)
    found = checkpoints.find(folder, "best" if settings["eval_only"] else "latest")
    resuming = init_from == "resume" or init_from == "auto" and found.exists()
    if resuming:
        if folder.suffix != ".pt" and not found.exists():
            cure = "name the run's folder with --out_dir, or leave out --init_from=resume to start this run"
            raise UserError(f"{folder} holds no checkpoint (options are part of a folder's name): {cure}")
        checkpoint = checkpoints.load(found)
        settings = resumed_settings(checkpoint, requested)
    settings["out_dir"] = str(folder)
    check_settings(settings)
    if not resuming:
        check_folder(folder, settings)
        settings["warmup_iters"] = settings["warmup_iters"] or min(100, math.ceil(settings["max_iters"] / 8))
    elif not settings["eval_only"]:
        if checkpoint["iter_num"] >= settings["max_iters"]:
            reached = f"{found} is at step {checkpoint['iter_num']}"
            if init_from != "auto":
                raise UserError(f"max_iters = {settings['max_iters']}, but {reached}: raise it to continue")
            print0(f"{reached}: nothing left to do")
            raise SystemExit(0)
        best = checkpoints.find(folder, "best")
        try:  # it may be newer than ckpt.pt and must not be replaced by a worse one
            checkpoint["best_val_loss"] = checkpoints.load(best)["best_val_loss"]
        except checkpoints.Damaged:
            checkpoint["best_val_loss"] = math.inf
            print0(f"NOTE    {best} is damaged: the run continues from {found}, and its next evaluation replaces it")
    return settings, checkpoint, resuming


def new_settings(requested, source) -> dict:
    """Return the settings of a run that does not resume. `source` is another run's checkpoint, if it begins from one.

    It inherits the settings of that run's model, of which given ones may replace those that are not its shape.
    """
    settings = requested.values
    if settings["init_from"] == "auto":
        settings["init_from"] = "scratch"
    if source:
        config, chosen = vars(checkpoints.config_of(source)), requested.given.keys() - SHAPE
        settings |= {name: config[name] for name in config.keys() & settings.keys() - chosen}
    return settings


def run_folder(settings, requested, source) -> Path:
    """Return out_dir, or else a folder in out/ with the names of the config files, or of the dataset, and of options.

    Options are part of its name if a resumed run may not change them, if they make a difference to defaults and files,
    and if they have an effect.
    """
    if settings["out_dir"]:
        return Path(settings["out_dir"])
    naming = requested.options.keys() - MAY_CHANGE
    if settings["init_from"] == "resume" and not requested.files and not naming:
        return checkpoints.newest_run()
    naming |= {"init_from"} if source else set()
    words = [Path(path).stem for path, _ in requested.files]
    if not words:
        words, naming = [os.path.basename(os.path.abspath(settings["dataset"]))], naming - {"dataset"}
    without = new_settings(requested._replace(options={}), source)
    for name, value in settings.items():  # in their order, whatever that of the options is
        if name in naming and value != without[name] and not without_effect(settings, name):
            text = str(value).removeprefix("run:").removeprefix("out/").removesuffix(".pt")
            text = re.sub(r"[^\w.+-]+", "_", text).strip("_")
            bare = name in METHOD and not requested.files
            words.append(name if value is True else text if bare else f"{name}={text}")
    return Path("out", "-".join(words))


def resumed_settings(checkpoint, requested) -> dict:
    """Return the run's settings (the default where it has none), updated by given ones that may change."""
    defaults, given = requested.defaults, requested.given
    settings = {name: checkpoint["settings"].get(name, default) for name, default in defaults.items()}
    settings["eval_only"] = False
    ignored = {"init_from", "out_dir"} | (SHAPE if settings["init_from"].startswith("run:") else set())
    ignored |= {name for name, auto in AUTO.items() if given.get(name) == auto}
    may_change = MAY_CHANGE | {"dataset"}  # a folder that has moved: check_data sees whether it is the same text
    may_change |= {"batch_size", "dtype"} if given.get("eval_only") else set()
    changes = {name: value for name, value in given.items() if name not in ignored and value != settings[name]}
    fixed = [f"{name} = {changes[name]!r} (was {settings[name]!r})" for name in changes if name not in may_change]
    if fixed:
        raise UserError(f"{checkpoint['path']} was trained with other settings: leave out {', '.join(fixed)}")
    return settings | changes


# -- what is checked, and noted


def check_settings(settings):
    """Raise a UserError for a setting that cannot work, before anything is written or downloaded."""
    settings["compile"] = settings["compile"].lower()  # True and False are typed as for a switch
    for name, choices in CHOICES.items():
        if settings[name] not in choices and not (name == "init_from" and settings[name].startswith("run:")):
            raise UserError(f"{name} = {settings[name]!r} is invalid: it must be one of {', '.join(choices)}")
    check_range(settings, "batch_size grad_accum_steps max_iters checkpoint_interval eval_tokens log_interval", 1)
    check_range(settings, "seed eval_interval warmup_iters learning_rate min_lr_frac weight_decay grad_clip", 0)
    check_range(settings, "beta1 beta2", 0, 1)
    if settings["out_dir"].endswith(".pt") and not settings["eval_only"]:
        raise UserError(f"out_dir = {settings['out_dir']!r} is invalid: it must be a run's folder")
    if settings["grad_accum_steps"] % world_size() and not settings["eval_only"]:
        shared = f"it must be a multiple of {world_size()}, the number of processes"
        raise UserError(f"grad_accum_steps = {settings['grad_accum_steps']} is invalid: {shared}")
    checkpoints.make_config(settings)


@file_errors()
def check_folder(folder, settings):
    """Raise a UserError if the folder of a new run holds one already, or if there is nothing to evaluate."""
    if settings["eval_only"]:
        if settings["init_from"] == "scratch":
            cure = "add --init_from=resume, and the run's config or --out_dir"
            raise UserError(f"eval_only = True needs a trained model: {cure}")
    elif checkpoints.find(folder).exists():
        # with these, the same command finds the folder, whose name may have the run that this one starts from
        resume = "--init_from=resume" + f" --out_dir={folder}" * settings["init_from"].startswith("run:")
        cure = f"add {resume} to continue it (and --max_iters=N to train longer), or --out_dir=FOLDER for another run"
        raise UserError(f"{folder} already holds a run: {cure}")


def check_data(data, checkpoint, same_text):
    """Raise a UserError if the data are not in the checkpoint's tokens, or not what it was trained on, if required."""
    path, trained_on = checkpoint["path"], checkpoint["data"]
    same_tokens = data.tokenizer.state() == checkpoint["tokenizer"]
    if same_text and not (same_tokens and data.meta["sha256"] == trained_on["sha256"]):
        cure = f"prepare {trained_on['source']} again"
        raise UserError(f"{path} was not trained on {data.folder}: {cure}")
    if not same_tokens:
        cure = command("data/text/prepare.py", "TEXT", "--name=NAME", f"--tokenizer=run:{path.parent}")
        problem = f"{data.folder} does not use the tokenizer of {path}"
        raise UserError(f"{problem}: prepare its text with {cure}, then add --dataset=NAME")


def without_effect(settings, name) -> set:
    """Return the settings, NAME=VALUE, with which the setting `name` has no effect."""
    return NO_EFFECT.get(name, set()) & {f"{other}={value}" for other, value in settings.items()}


def ineffective_settings(settings, given):
    """Return a line for each given setting that has no effect."""
    lines = []
    for name, value in given.items():
        lines += [f"{name} = {value!r} has no effect with {other}" for other in without_effect(settings, name)]
        if name in SHAPE and value != settings[name]:
            lines.append(f"{name} = {value!r} has no effect: {settings['init_from']} has {settings[name]!r}")
    return lines


def replaced_settings(files):
    """Return a line for each setting that a config file replaces with another value than that of an earlier file."""
    lines, found = [], {}
    for path, values in files:
        for name, value in values.items():
            earlier, was = found.get(name, (path, value))
            if value != was:
                lines.append(f"{name} = {value!r} of {path} replaces {was!r} of {earlier}")
            found[name] = path, value
    return lines


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
