"""A run's log.jsonl, a JSON object per line; TensorBoard and Weights & Biases; the version of the code."""

import io
import json
import os
import subprocess
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from config.runtime.errors import FolderInUse, file_errors, print0, rank
from config.runtime.files import CHECKPOINTS, file_lock, sha256

ROOT = Path(__file__).resolve().parents[2]
CODE = ("model.py", "train.py", "config/__init__.py", "config/runtime/*.py", "data/*.py", "data/huggingface/*.py")


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
