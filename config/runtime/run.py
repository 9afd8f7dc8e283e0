"""A run's folder: its checkpoints, its log, and how a run starts or resumes."""

import io
import json
import math
import os
import re
import subprocess
import zipfile
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from config.runtime.checks import SHAPE, check_settings, of_model
from config.runtime.errors import FolderInUse, UserError, file_errors
from config.runtime.files import atomic_write, file_lock, sha256
from config.runtime.processes import all_max, print0, rank
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parents[2]
CODE = ("model.py", "train.py", "config/__init__.py", "config/runtime/*.py", "data/*.py", "data/huggingface/*.py")
CHECKPOINT_VERSION = 9  # of the layout of a checkpoint
CHECKPOINTS = ("new.pt", "ckpt.pt", "best.pt")  # of a run; new.pt: the first one of a run that is replacing another
# settings that a resumed run may change; with any other it would be a different run
MAY_CHANGE = {"out_dir", "init_from", "overwrite", "eval_only", "max_iters", "device", "compile"}
MAY_CHANGE |= {"checkpoint_interval", "eval_interval", "log_interval", "tensorboard", "wandb"}
# settings that a run does not inherit from the one it starts from
NOT_INHERITED = {"block_size", "vocab_size", "dropout", "activation_checkpointing"}
# weights that mean something else under another value of a setting, in spite of the same name and shape
MEANING = {"attention": r"\.attn\.(?!\w+_proj\.)", "qk_scale": r"\.attn\.(log_a|a|b)$", "residual": r"\.mix$"}


# -- how a run starts, or resumes


def begin(log, defaults, given, world_size):
    """Return the settings of a run and, if it resumes, the checkpoint to resume from, else None."""
    settings = defaults | given
    checkpoint, asked = None, settings["init_from"]
    resuming = asked == "resume"
    if asked == "auto":
        resuming = find_checkpoint(log.folder).exists()
        settings["init_from"] = "scratch"
    if resuming:
        checkpoint = load_checkpoint(find_checkpoint(log.folder, "best" if settings["eval_only"] else "latest"))
        settings = resumed_settings(checkpoint, given, defaults)
    check_settings(settings, world_size)
    if not resuming:
        check_folder(log, settings)
    elif checkpoint["iter_num"] >= settings["max_iters"] and not settings["eval_only"]:
        reached = f"{checkpoint['path']} is at step {checkpoint['iter_num']}"
        if asked == "auto":
            print0(f"{reached} of the run's {settings['max_iters']}: nothing left to do")
            raise SystemExit(0)
        raise UserError(f"max_iters = {settings['max_iters']}, but {reached}: raise it to continue")
    return settings, checkpoint


def resumed_settings(checkpoint, given, defaults):
    """Return the run's settings (for newer ones, the default), updated by given ones that may change."""
    settings = {name: checkpoint["settings"].get(name, default) for name, default in defaults.items()}
    may_change = MAY_CHANGE
    if given.get("eval_only"):
        may_change = MAY_CHANGE | {"dataset", "batch_size", "dtype"}
    ignored = {"init_from"}
    if settings["init_from"].startswith(("hf:", "run:")):
        ignored |= SHAPE
    settings |= {name: defaults[name] for name in ("out_dir", "overwrite", "eval_only")}
    changes = {name: value for name, value in given.items() if name not in ignored}
    for name in ("dtype", "compile"):
        if given.get(name) == "auto":  # the run keeps what that was
            del changes[name]
    others = [name for name, value in changes.items() if name not in may_change and value != settings[name]]
    if others:
        changed = ", ".join(f"{name} = {changes[name]!r} (was {settings[name]!r})" for name in others)
        raise UserError(f"{checkpoint['path']} was trained with other settings: leave out {changed}")
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
    was = checkpoint["settings"]
    for name in sorted(was.keys() ^ settings.keys()):
        change = "added since the checkpoint" if name in settings else "no longer in train.py"
        lines.append(f"{name} = {(was | settings)[name]!r}: {change}")
    if settings["max_iters"] != was["max_iters"] and settings["lr_decay"] != "none":
        change = f"max_iters = {settings['max_iters']} (was {was['max_iters']})"
        lines.append(f"{change}: the learning rate decays differently")
    if checkpoint["machine"] != machine:
        lines.append(f"resuming on {machine} instead of {checkpoint['machine']}: results will not match bit for bit")
    return lines


def lowest_loss(folder) -> float:
    """Return the validation loss of best.pt, which may be newer than ckpt.pt."""
    path = find_checkpoint(folder, prefer="best")
    return load_checkpoint(path)["val_loss"] if path.name != "ckpt.pt" else math.inf


@file_errors()
def check_folder(log, settings):
    """Raise a UserError if a new run would replace another, or if there is nothing to start from, or to evaluate."""
    if settings["init_from"].startswith("run:"):
        source_checkpoint(settings["init_from"]).stat()
    if settings["eval_only"]:
        if settings["init_from"] == "scratch":
            cure = "add --init_from=resume, and the run's config or --out_dir"
            raise UserError(f"eval_only = True needs a trained model: {cure}")
    elif not settings["overwrite"]:
        ways = "--overwrite=true replaces it, --out_dir=FOLDER leaves it alone"
        if find_checkpoint(log.folder).exists():
            raise UserError(f"{log.folder} already holds a run: --init_from=resume continues it, {ways}")
        if log.has_ended():
            raise UserError(f"{log.folder} holds the log of a finished run but no checkpoint: {ways}")


def begin_from_run(settings, given, data):
    """Return a model with the weights of another run (run:FOLDER), and a line for what is not as it was there.

    Inherited settings go into `settings`. A weight is kept if both models have it, in the same shape and meaning.
    """
    source = load_checkpoint(source_checkpoint(settings["init_from"]))
    check_tokens(data, source["tokenizer"], source["path"], settings["init_from"])
    old = config_of(source)
    inherited = of_model(settings).keys() - NOT_INHERITED - (given.keys() - SHAPE)
    settings |= {name: getattr(old, name) for name in inherited}
    model = GPT(replace(old, **of_model(settings)))
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
    for name in ("block_size", "dropout"):
        if name not in given and settings[name] != getattr(old, name):
            notes.append(f"{name} = {settings[name]}, not {getattr(old, name)} as in {settings['init_from']}")
    return model, notes


def check_tokens(data, state, owner, tokenizer):
    """Raise a UserError if the data are not in the `owner`'s tokens, with a command that prepares a text in them."""
    if data.tokenizer.state() != state:
        cure = f"python data/text/prepare.py TEXT --name=NAME --tokenizer={tokenizer}, then --dataset=NAME"
        raise UserError(f"{data.folder} does not use the tokenizer of {owner}: prepare its text with {cure}")


# -- checkpoints


def save_checkpoint(path, facts, log) -> bool:
    """Write `facts` on the first of several processes. Return whether that worked, on all of them."""
    failed = False
    if rank() == 0:
        try:
            log.hold_folder()
            with atomic_write(log.first_checkpoint if log.pending else path) as file:
                torch.save({"version": CHECKPOINT_VERSION, **facts}, file)
            if log.pending:
                log.replace_old_run(path)
        except (OSError, RuntimeError) as raised:
            error = raised if isinstance(raised, OSError) else raised.__context__  # PyTorch wraps what `file` raises
            if not isinstance(error, OSError):
                raise
            log.problem = error.strerror
            print0(f"NOT SAVED: {path} at step {facts['iter_num']}: {log.problem}; training continues")
            failed = True
    return not all_max(failed)


@file_errors()
def find_checkpoint(folder, prefer="latest"):
    """Return the path of ckpt.pt ("latest") or best.pt ("best") of a run, or the other one if only that exists.

    Next to new.pt, both belong to the run that was being replaced.
    """
    names = ("best.pt", "ckpt.pt") if prefer == "best" else ("ckpt.pt", "best.pt")
    existing = [folder / name for name in ("new.pt", *names) if (folder / name).exists()]
    return existing[0] if existing else folder / names[0]


def source_checkpoint(name):
    """Return the path of the checkpoint that run:FOLDER names."""
    return find_checkpoint(Path(os.path.expanduser(name.removeprefix("run:"))), prefer="best")


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


def load_weights(model, weights, owner):
    """Copy `weights`, which must be all of a model's and no others, into `model`."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # says which are missing, unexpected or of another size
        problem = " ".join(str(error).split())
        raise UserError(f"{owner} does not match this model.py: {problem:.300}") from None


def newest_run():
    saved = list(Path("out").glob("*/*.pt"))
    if not saved:
        cure = "train one first (python train.py config/m1_shakespeare.py), or name one with --out_dir=FOLDER"
        raise UserError(f"{Path('out').absolute()} holds no run: {cure}")
    return max(saved, key=lambda path: path.stat().st_mtime).parent


def config_of(checkpoint):
    try:
        return GPTConfig(**checkpoint["config"])
    except TypeError as error:  # says which field model.py lacks
        raise UserError(f"{checkpoint['path']} does not match this model.py: {error}") from None


def build_model(checkpoint) -> GPT:
    model = GPT(config_of(checkpoint))
    load_weights(model, checkpoint["model"], checkpoint["path"])
    return model


# -- the log


class Log:
    """The log in a run's folder, written by the first of several processes, and the trackers that get its numbers."""

    @file_errors()
    def __init__(self, folder):
        self.folder, self.path, self.file, self.trackers = folder, folder / "log.jsonl", None, {}
        self.first_checkpoint, *self.checkpoints = (folder / name for name in CHECKPOINTS)
        self.pending = None  # the lines of a run that has not yet replaced the one in its folder
        self.problem = "the first process names the reason"  # of the latest checkpoint that could not be saved
        self.found = self.look()

    def look(self):
        """Return what changes when another process trains in the folder."""
        paths = (self.first_checkpoint, *self.checkpoints, self.path)
        stats = [path.stat() for path in paths if path.exists()]
        return [(stat.st_size, stat.st_mtime_ns) for stat in stats if stat.st_size]

    def has_ended(self):
        lines = self.path.read_bytes().splitlines() if self.path.is_file() else []
        return bool(lines) and lines[-1].startswith(b'{"event": "end"')

    @file_errors()
    def open(self, iter_num, settings):
        """Take the folder for this process. Keep the lines of its log up to step iter_num."""
        if rank() != 0:
            self.file = open(os.devnull, "wb")
            return
        self.hold_folder()
        probe = self.folder / "ckpt.pt.tmp"  # a folder that cannot be written to is an error now, not at the first save
        probe.write_bytes(b"")
        probe.unlink()
        if settings["overwrite"] and not iter_num and self.found:
            self.pending = io.BytesIO()
        elif self.first_checkpoint.exists():  # of a run that was killed while it replaced another
            self.remove_old_run(self.folder / "best.pt")
        else:
            self.file.truncate(self.end_of(iter_num))
        for name, start in {"tensorboard": start_tensorboard, "wandb": start_wandb}.items():
            if settings[name]:
                self.trackers[name] = cache(partial(start, self.folder, iter_num, settings))

    def hold_folder(self):
        """Make the folder and open its log, also if they are gone. Raise a FolderInUse if another run has them."""
        first = self.file is None
        if first or not self.path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab", buffering=2**20)  # on a full disk lines wait here for room
        ours = os.path.samestat(self.path.stat(), os.fstat(self.file.fileno())) and file_lock(self.file)
        if not ours or first and self.look() != self.found:
            cure = "wait for it, or choose another --out_dir"
            raise FolderInUse(f"{self.folder}: another process is training there, or has just done so: {cure}")

    def end_of(self, iter_num):
        """Return where the last line up to step iter_num ends: later steps will run again."""
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True) if iter_num else []:
            facts = whole_line(line)
            if not facts or facts["step"] > iter_num:  # only the last line can be torn
                break
            end += len(line)
        return end

    def replace_old_run(self, path):
        """Remove the run that --overwrite replaces, now that the first checkpoint of this one is on the disk."""
        self.remove_old_run(path)
        lines, self.pending = self.pending.getvalue(), None
        self.write(lines)
        for line in lines.splitlines():
            self.track(**json.loads(line))

    def remove_old_run(self, path):
        """Give new.pt the name `path` last: until then it says that all else is of the old run."""
        for old in self.checkpoints:
            old.unlink(missing_ok=True)
        self.file.truncate(0)
        os.replace(self.first_checkpoint, path)

    def log(self, event, step, **facts):
        self.write(json.dumps({"event": event, "step": step, **facts}).encode() + b"\n")
        if not self.pending:
            self.track(event, step, **facts)

    def track(self, event, step, **facts):
        numbers = {f"{event}/{name}": fact for name, fact in facts.items() if isinstance(fact, (int, float))}
        for name, tracker in list(self.trackers.items()):
            try:
                tracker()(numbers, step)
            except Exception as error:  # a full disk, a lost network: no reason to lose a run
                del self.trackers[name]
                print0(f"NOT TRACKED from step {step} on: {name}: {error}; training continues")

    def write(self, lines):
        """Write lines. On a full disk they wait for the next ones, or are lost."""
        file = self.pending or self.file
        try:
            file.write(lines)
            file.flush()
        except OSError as error:
            print0(f"NOT WRITTEN: {self.path}: {error.strerror}; training continues")


def whole_line(line) -> dict | None:
    """Return the facts in a line of the log, None if it is torn."""
    with suppress(ValueError):
        match json.loads(line):
            case {"step": int()} as facts if line.endswith(b"\n"):
                return facts


def start_tensorboard(folder, iter_num, settings):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder, purge_step=iter_num + 1)  # steps after the checkpoint will run again

    def track(numbers, step):
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)
        writer.flush()

    return track


def start_wandb(folder, iter_num, settings):
    import wandb

    id_file = folder / "wandb.id"  # lets a resumed run continue the same wandb run
    known = id_file.read_text() if iter_num and id_file.exists() else None
    run = wandb.init(name=folder.name, id=known, resume="allow" if known else None, config=settings, dir=folder)
    id_file.write_text(run.id)
    return lambda numbers, step: run.log(numbers, step=step)


# -- the version of the code


@file_errors()
def code_version() -> dict:
    """Return the SHA-256 of the training code, of each of its files, and the git commit."""
    paths = [path for pattern in CODE for path in sorted(ROOT.glob(pattern))]
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    contents = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}
    files = {name: sha256(content) for name, content in contents.items()}
    return {"sha256": sha256(b"".join(contents.values())), "files": files, "commit": commit}


def code_notes(checkpoint, code, training=True):
    """Return a line that names the files that differ from those of the run: of all its code, or model.py alone."""
    was = checkpoint["code"]
    names = was["files"] if training else ["model.py"]
    changed = [name for name in names if was["files"][name] != code["files"].get(name)]
    if not changed:
        return []
    back = "restore the files of that run"
    commit = was["commit"] or "-dirty"
    if not commit.endswith("-dirty"):
        back = f"git stash && git checkout {commit} -- {' '.join(changed)}"  # stash keeps edits that are not committed
    differ = f"{', '.join(changed)}: changed since {checkpoint['path']} was trained, so results may differ"
    return [f"{differ}; to go back: {back}"]
