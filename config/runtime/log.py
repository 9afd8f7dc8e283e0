"""A run's log.jsonl, a JSON object per line; TensorBoard and Weights & Biases; the version of the code."""

import io
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from config.runtime.errors import FolderInUse, file_errors, print0, rank
from config.runtime.files import file_lock, sha256

ROOT = Path(__file__).resolve().parents[2]


class Log:
    """The log in a run's folder, written by the first of several processes, and the trackers that get its numbers."""

    @file_errors()
    def __init__(self, folder):
        self.folder, self.path, self.trackers = folder, folder / "log.jsonl", {}
        self.checkpoints = folder / "ckpt.pt", folder / "best.pt"
        self.replaced = None  # the open log of the run that this one is about to replace
        self.found = self.look()
        self.fastest, self.slowness_noted = 0.0, False

    def look(self):
        """Return what changes when another process trains in the folder."""
        stats = [path.stat() if path.exists() else None for path in (*self.checkpoints, self.path)]
        return [(stat.st_size, stat.st_mtime_ns) for stat in stats if stat and stat.st_size]

    def has_ended(self):
        lines = self.path.read_bytes().splitlines() if self.path.is_file() else []
        return bool(lines) and lines[-1].startswith(b'{"event": "end"')

    @file_errors()
    def open(self, iter_num, settings):
        """Take the folder for this process. Keep the lines of its log up to step iter_num."""
        if rank() != 0:
            self.file = open(os.devnull, "wb")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=2**20)  # on a full disk lines wait here for room
        if not file_lock(self.file) or self.look() != self.found:
            cure = "wait for it, or choose another --out_dir"
            raise FolderInUse(f"{self.folder}: another process is training there, or has just done so: {cure}")
        if settings["overwrite"] and not iter_num and self.found:
            self.replaced, self.file = self.file, io.BytesIO()
        else:
            self.file.truncate(self.end_of(iter_num))
        if settings["tensorboard"]:
            self.trackers["TensorBoard"] = start_tensorboard(self.folder, iter_num)
        if settings["wandb"]:
            self.trackers["Weights & Biases"] = start_wandb(self.folder, iter_num, settings)

    def end_of(self, iter_num):
        """Return where the last line up to step iter_num ends: later steps will run again."""
        end = place = 0
        for line in self.path.read_bytes().splitlines(keepends=True) if iter_num else []:
            place, facts = place + len(line), whole_line(line)
            if facts and facts["step"] > iter_num:
                break
            end = place if facts else end  # a torn last line is dropped
        return end

    def replace_old_run(self):
        """Remove the run that --overwrite replaces, now that a checkpoint of this one is about to get its name."""
        if self.replaced:
            for path in self.checkpoints:
                path.unlink(missing_ok=True)
            lines, self.file, self.replaced = self.file.getvalue(), self.replaced, None
            self.file.truncate(0)
            self.write(lines)

    def log(self, event, iter_num, **facts):
        self.write(json.dumps({"event": event, "step": iter_num, **facts}).encode() + b"\n")
        numbers = {f"{event}/{name}": fact for name, fact in facts.items() if isinstance(fact, (int, float))}
        for name, track in list(self.trackers.items()):
            try:
                track(numbers, iter_num)
            except Exception as error:  # a full disk, a lost network: no reason to lose a run
                del self.trackers[name]
                print0(f"NOT TRACKED from step {iter_num} on: {name}: {error}; training continues")

    def note_slowness(self, device, speed, seconds, resume):
        """Print a note, once, if steps on a CPU have become three times as slow (config/runtime/waiting.py)."""
        self.fastest = max(self.fastest, speed)
        loops = device.type == "cpu" and os.environ.get("OMP_WAIT_POLICY") != "PASSIVE"
        if loops and not self.slowness_noted and speed < self.fastest / 3 and seconds > 2:  # for seconds: not by chance
            self.slowness_noted = True
            cure = f"if another program is busy, stop and enter OMP_WAIT_POLICY=PASSIVE {resume}"
            print0(f"NOTE    steps take three times as long as before: {cure}")

    def write(self, lines):
        """Write lines. On a full disk they wait for the next ones, or are lost."""
        try:
            self.file.write(lines)
            self.file.flush()
        except OSError as error:
            print0(f"NOT WRITTEN: {self.path}: {error.strerror}; training continues")


def whole_line(line) -> dict | None:
    """Return the facts in a line of the log, None if it is torn."""
    with suppress(ValueError, RecursionError):
        match json.loads(line):
            case {"step": int()} as facts if line.endswith(b"\n"):
                return facts


@file_errors()
def code_version() -> dict:
    """Return the SHA-256 of the training code and of model.py alone, and the git commit."""
    files = [ROOT / "model.py", ROOT / "train.py", ROOT / "config" / "__init__.py"]
    files += sorted([*ROOT.glob("config/runtime/*.py"), *ROOT.glob("data/*.py")])
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    contents = [file.read_bytes() for file in files]
    return {"sha256": sha256(b"".join(contents)), "model": sha256(contents[0]), "commit": commit}


def start_tensorboard(folder, iter_num):
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
