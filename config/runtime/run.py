"""A run's folder: its lock, its log and its checkpoints, and how a run starts or resumes."""

import json
import math
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from config.runtime.checks import SHAPE, check_settings, make_config, of_model
from config.runtime.errors import ROOT, FolderInUse, UserError, command, file_errors, import_optional
from config.runtime.files import atomic_write, file_lock, sha256
from config.runtime.processes import print0, rank, world_size
from model import GPT, GPTConfig

CODE = ("model.py", "train.py", "config/__init__.py", "config/runtime/*.py", "data/*.py", "data/huggingface/*.py")
CHECKPOINT_VERSION = 10  # of the layout of a checkpoint

# settings that a resumed run may change; with any other it would be a different run
MAY_CHANGE = {"out_dir", "init_from", "overwrite", "eval_only", "max_iters", "device", "compile"}
MAY_CHANGE |= {"checkpoint_interval", "eval_interval", "log_interval", "tensorboard", "wandb"}
# settings that a run does not inherit from the one it starts from
NOT_INHERITED = {"block_size", "dropout", "activation_checkpointing"}
OWN = r"\.attn\.(?!\w+_proj\.)"  # weights of an attention kind that others do not have
# weights that mean something else under another value of a setting, in spite of the same name and shape
MEANING = {"attention": OWN, "w2_score": OWN, "qk_scale": r"\.attn\.(log_a|a|b)$", "residual": r"\.mix$"}


# -- the folder: one process writes to it, and ends if it cannot


class Run:
    """The folder of a run, with its log and its checkpoints. Only the first of several processes writes to it."""

    def __init__(self, folder):
        self.folder, self.log_path = folder, folder / "log.jsonl"

    def open(self, iter_num, settings):
        """Lock the folder for this process. Keep the lines of its log up to step iter_num."""
        self.max_iters = settings["max_iters"]
        if rank() != 0:
            return
        with file_errors():
            self.log_file = lock_folder(self.folder)
            if settings["overwrite"] and not iter_num and any(self.folder.glob("*.pt")):
                self.move_aside()
            self.log_file.truncate(end_of_log(self.log_path, iter_num))
        self.trackers = start_trackers(self.folder, iter_num, settings)

    def move_aside(self):
        """Rename the folder of an old run to NAME.old, and make a new one. At any moment the old run is whole."""
        aside = self.folder.with_name(f"{self.folder.name}.old")
        if any(aside.glob("*.pt")):  # an older one
            shutil.rmtree(aside)
        self.folder.rename(aside)
        print0(f"the old run in {self.folder} is now in {aside}")
        self.log_file = lock_folder(self.folder)

    def log(self, event, step, **facts):
        """Write a line of JSON, which has no inf and nan: they are null."""
        if rank() != 0:
            return
        numbers = {name: fact for name, fact in facts.items() if isinstance(fact, int | float)}
        facts |= {name: None for name, number in numbers.items() if not math.isfinite(number)}
        line = json.dumps({"event": event, "step": step, **facts}).encode() + b"\n"
        with self.write_errors(self.log_path):
            while line:  # on a full disk only a part of it is written, and an error comes with the next part
                line = line[self.log_file.write(line) :]
        for track in self.trackers:
            track({f"{event}/{name}": number for name, number in numbers.items()}, step)

    def save(self, name, state):
        """Write a checkpoint. If that fails, the previous one stays as it is."""
        if rank() != 0:
            return
        with self.write_errors(self.folder / name), atomic_write(self.folder / name) as file:
            torch.save({"version": CHECKPOINT_VERSION, **state}, file)

    @contextmanager
    def write_errors(self, path):
        """Turn an OSError inside into a UserError with the command that resumes the run."""
        try:
            yield
        except (OSError, RuntimeError) as raised:
            error = raised if isinstance(raised, OSError) else raised.__context__  # PyTorch hides what `file` raises
            if not isinstance(error, OSError):
                raise
            raise UserError(f"{path}: {error.strerror}; to resume: {self.resume_command(self.max_iters)}") from error

    def resume_command(self, max_iters):
        """Return the command that resumes this run or, if it has no checkpoint, starts it again."""
        resume = "--init_from=resume", f"--out_dir={self.folder}", f"--max_iters={max_iters}"
        again = command("train.py", *(resume if find_checkpoint(self.folder).exists() else sys.argv[1:]))
        return again if world_size() == 1 else again.replace("python", "torchrun ...", 1)


def lock_folder(folder):
    """Open and lock the log of a folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / "log.jsonl", "ab", buffering=0)
    if not file_lock(file):
        raise FolderInUse(f"{folder}: another process is training there: wait for it, or choose another --out_dir")
    return file


def end_of_log(path, iter_num) -> int:
    """Return where the last line up to step iter_num ends: later steps will run again."""
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if iter_num else []:
        if not line.endswith(b"\n") or json.loads(line)["step"] > iter_num:  # only the last line can be torn
            break
        end += len(line)
    return end


def start_trackers(folder, iter_num, settings):
    """Return functions (numbers, step) -> None, of TensorBoard and Weights & Biases if the settings ask for them."""
    trackers = []
    if settings["tensorboard"]:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder, purge_step=iter_num + 1)  # steps after the checkpoint will run again

        def track(numbers, step):
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)
            writer.flush()

        trackers.append(track)
    if settings["wandb"]:
        trackers.append(import_optional("wandb").init(name=folder.name, config=settings, dir=folder).log)
    return trackers


# -- how a run starts, or resumes


def begin(folder, defaults, given):
    """Return the settings of a run and, if it resumes, the checkpoint to resume from, else None."""
    settings = defaults | given
    checkpoint, requested = None, settings["init_from"]
    resuming = requested == "resume"
    if requested == "auto":
        resuming = find_checkpoint(folder).exists()
        settings["init_from"] = "scratch"
    if resuming:
        checkpoint = load_checkpoint(find_checkpoint(folder, "best" if settings["eval_only"] else "latest"))
        settings = resumed_settings(checkpoint, given, defaults)
    check_settings(settings, world_size())
    if not resuming:
        check_folder(folder, settings)
    elif checkpoint["iter_num"] >= settings["max_iters"] and not settings["eval_only"]:
        reached = f"{checkpoint['path']} is at step {checkpoint['iter_num']}"
        if requested == "auto":
            print0(f"{reached} of the run's {settings['max_iters']}: nothing left to do")
            raise SystemExit(0)
        raise UserError(f"max_iters = {settings['max_iters']}, but {reached}: raise it to continue")
    return settings, checkpoint


@file_errors()
def check_folder(folder, settings):
    """Raise a UserError if the folder holds a run, or if there is nothing to start from, or to evaluate."""
    if settings["init_from"].startswith("run:"):
        source_checkpoint(settings["init_from"]).stat()
    if settings["eval_only"]:
        if settings["init_from"] == "scratch":
            cure = "add --init_from=resume, and the run's config or --out_dir"
            raise UserError(f"eval_only = True needs a trained model: {cure}")
    elif find_checkpoint(folder).exists() and not settings["overwrite"]:
        ways = "--init_from=resume continues it, --overwrite moves it aside, --out_dir=FOLDER leaves it alone"
        raise UserError(f"{folder} already holds a run: {ways}")


def resumed_settings(checkpoint, given, defaults):
    """Return the run's settings (the default where it has none), updated by given ones that may change."""
    settings = {name: checkpoint["settings"].get(name, default) for name, default in defaults.items()}
    settings |= {name: defaults[name] for name in ("out_dir", "overwrite", "eval_only")}
    ignored = {"init_from"} | (SHAPE if settings["init_from"].startswith(("hf:", "run:")) else set())
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
        check_tokens(data, checkpoint["tokenizer"], path, f"run:{path.parent}")
    elif data.meta["sha256"] != trained_on["sha256"] or data.tokenizer.state() != checkpoint["tokenizer"]:
        cure = f"prepare {trained_on['source']} again"
        raise UserError(f"{path} was not trained on {data.folder}: {cure}")
    return build_model(checkpoint)


def resume_notes(checkpoint, settings, machine, code):
    if settings["eval_only"]:
        return code_notes(checkpoint, code, training=False)
    lines = code_notes(checkpoint, code)
    steps, steps_were = settings["max_iters"], checkpoint["settings"]["max_iters"]
    if steps_were != steps and settings["lr_decay"] != "none":
        lines.append(f"max_iters = {steps} (was {steps_were}): the learning rate decays differently")
    if checkpoint["machine"] != machine:
        lines.append(f"resuming on {machine} instead of {checkpoint['machine']}: results will not match bit for bit")
    return lines


def begin_from_run(settings, given, data):
    """Return a model with the weights of another run (run:FOLDER), and a note that lists new weights.

    Inherited settings go into `settings`. A weight is kept if both models have it, in the same shape and meaning.
    """
    source = load_checkpoint(source_checkpoint(settings["init_from"]))
    check_tokens(data, source["tokenizer"], source["path"], settings["init_from"])
    old = config_of(source)
    inherited = of_model(settings).keys() - NOT_INHERITED - (given.keys() - SHAPE)
    settings |= {name: getattr(old, name) for name in inherited}
    model = GPT(make_config(settings, **asdict(old)))
    differing = [name for name in MEANING if getattr(old, name) != getattr(model.config, name)]
    kept, new = {}, set()
    for name, tensor in model.state_dict().items():
        found = source["model"].get(name)
        other_meaning = any(re.search(MEANING[setting], name) for setting in differing)
        if found is None or found.shape != tensor.shape or other_meaning:
            new.add(re.sub(r"\.\d+\.", ".*.", name))
        else:
            kept[name] = found
    model.load_state_dict(kept, strict=False)
    notes = [f"new weights, not from {settings['init_from']}: {', '.join(sorted(new))}"] if new else []
    return model, notes


def check_tokens(data, state, owner, tokenizer):
    """Raise a UserError if the data are not in the `owner`'s tokens, with a command that prepares a text in them."""
    if data.tokenizer.state() != state:
        cure = command("data/text/prepare.py", "TEXT", "--name=NAME", f"--tokenizer={tokenizer}")
        problem = f"{data.folder} does not use the tokenizer of {owner}"
        raise UserError(f"{problem}: prepare its text with {cure}, then add --dataset=NAME")


# -- checkpoints


@file_errors()
def find_checkpoint(folder, prefer="latest"):
    """Return the path of ckpt.pt ("latest") or best.pt ("best") of a run, or the other one if only that exists."""
    path, other = folder / "ckpt.pt", folder / "best.pt"
    if prefer == "best":
        path, other = other, path
    return other if other.exists() and not path.exists() else path


def source_checkpoint(name):
    """Return the path of the checkpoint that run:FOLDER names."""
    return find_checkpoint(Path(name.removeprefix("run:")), prefer="best")


def newest_run():
    saved = list(Path("out").glob("*/*.pt"))
    if not saved:
        train = command("train.py", "config/m1_shakespeare.py")
        cure = f"train one first ({train}), or name one with --out_dir=FOLDER"
        raise UserError(f"{Path('out').absolute()} holds no run: {cure}")
    return max(saved, key=lambda path: path.stat().st_mtime).parent


@file_errors()
def load_checkpoint(path) -> dict:
    """Return a whole checkpoint, on the CPU, and its "path". No code in it is run."""
    checkpoint = None
    with open(path, "rb") as file, suppress(Exception):  # damaged bytes raise all sorts of errors
        if zipfile.ZipFile(file).testzip() is None:  # torch.load does not look at the checksums in it
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or "version" not in checkpoint:
        raise UserError(f"{path}: damaged, or not a checkpoint of train.py")
    version = checkpoint["version"]
    if version != CHECKPOINT_VERSION:
        raise UserError(f"{path}: checkpoint version {version!r}; this program reads version {CHECKPOINT_VERSION}")
    return checkpoint | {"path": path}


def config_of(checkpoint) -> GPTConfig:
    try:
        return GPTConfig(**checkpoint["config"])
    except (TypeError, ValueError) as error:  # says which field model.py lacks
        raise UserError(f"{checkpoint['path']} does not match this model.py: {error}") from None


def build_model(checkpoint) -> GPT:
    model = GPT(config_of(checkpoint))
    load_weights(model, checkpoint["model"], checkpoint["path"])
    return model


def load_weights(model, weights, owner):
    """Copy `weights`, which must be all of a model's and no others, into `model`."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # says which are missing, unexpected or of another size
        problem = " ".join(str(error).split())
        raise UserError(f"{owner} does not match this model.py: {problem:.300}") from None


# -- the version of the code


@file_errors()
def code_version() -> dict:
    """Return the SHA-256 of each file of the training code, and the git commit."""
    paths = [path for pattern in CODE for path in sorted(ROOT.glob(pattern))]
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    files = {path.relative_to(ROOT).as_posix(): sha256(path.read_bytes()) for path in paths}
    return {"files": files, "commit": commit}


def code_notes(checkpoint, code, training=True):
    """Return a line that names the files that differ from those of the run: of all its code, or model.py alone."""
    was = checkpoint["code"]
    names = was["files"] if training else ["model.py"]
    changed = [name for name in names if was["files"].get(name) != code["files"].get(name)]
    if not changed:
        return []
    at = f" at commit {was['commit']}" if was["commit"] else ""
    return [f"{', '.join(changed)}: changed since {checkpoint['path']} was trained{at}, so results may differ"]
