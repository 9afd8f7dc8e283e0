"""The numbers of a run: log.jsonl, a JSON object per line, and TensorBoard and Weights & Biases beside it."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from config.runtime.common import UserError, file_errors, file_lock, print0, sha256

ROOT = Path(__file__).resolve().parents[2]


class MetricLogger:
    """Write log.jsonl in a run's folder, on the first of several processes, and send its numbers to the trackers."""

    @file_errors()
    def __init__(self, folder, iter_num, settings):
        """Take the folder for this process. Of a log that is there, the lines up to step iter_num stay."""
        self.path, self.trackers = folder / "log.jsonl", {}
        if os.environ.get("RANK", "0") != "0":
            self.file = open(os.devnull, "wb")
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=2**20)  # on a full disk lines wait here for room
        if not file_lock(self.file):
            raise UserError(f"{folder}: another process is training there: wait for it, or choose another --out_dir")
        self.file.truncate(self.end_of(iter_num))
        if settings["tensorboard"]:
            self.trackers["TensorBoard"] = start_tensorboard(folder, iter_num)
        if settings["wandb"]:
            self.trackers["Weights & Biases"] = start_wandb(folder, iter_num, settings)

    def end_of(self, iter_num):
        """Return where the log's last whole line up to step iter_num ends: what comes later will happen again."""
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True) if iter_num else []:
            try:
                if json.loads(line)["step"] > iter_num or not line.endswith(b"\n"):
                    break
            except ValueError:  # torn by a kill
                break
            end += len(line)
        return end

    def log(self, event, iter_num, **facts):
        """Write a line. On a full disk it waits for the next, or is lost; training goes on."""
        try:
            self.file.write(json.dumps({"event": event, "step": iter_num, **facts}).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            print0(f"NOT WRITTEN: {self.path} at step {iter_num}: {error.strerror}; training goes on")
        numbers = {f"{event}/{name}": fact for name, fact in facts.items() if isinstance(fact, (int, float))}
        for name, track in list(self.trackers.items()):
            try:
                track(numbers, iter_num)
            except Exception as error:  # a full disk, a lost network: no reason to lose a run
                del self.trackers[name]
                print0(f"NOT TRACKED from step {iter_num} on: {name}: {error}; training goes on")


@file_errors()
def has_ended(folder):
    """Say whether a folder has the log of a run that came to its end."""
    path = folder / "log.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return bool(lines) and lines[-1].startswith(b'{"event": "end"')


@file_errors()
def code_version() -> dict:
    """Return what tells a run's code: the SHA-256 of model.py and train.py, and the git commit, or None."""
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return {"sha256": sha256((ROOT / "model.py").read_bytes() + (ROOT / "train.py").read_bytes()), "commit": commit}


def start_tensorboard(folder, iter_num):
    """Return a function that sends numbers, by name, and their step to TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder, purge_step=iter_num + 1)  # what came after the checkpoint will happen again

    def track(numbers, step):
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)
        writer.flush()

    return track


def start_wandb(folder, iter_num, settings):
    """Return a function that sends numbers, by name, and their step to Weights & Biases."""
    import wandb

    id_file = folder / "wandb.id"  # by which a resumed run finds itself again
    known = id_file.read_text() if iter_num and id_file.exists() else None
    run = wandb.init(name=folder.name, id=known, resume="allow" if known else None, config=settings, dir=folder)
    id_file.write_text(run.id)
    return lambda numbers, step: run.log(numbers, step=step)
