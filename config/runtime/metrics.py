"""The numbers of a run: log.jsonl, a JSON object per line, and TensorBoard and Weights & Biases beside it."""

import json
import os

from data.console import UserError, file_errors, print0
from data.files import file_lock


class MetricLogger:
    """Writes log.jsonl in a run's folder; of several processes the first does. Numbers go to the trackers as well."""

    @file_errors()
    def __init__(self, folder, iter_num, settings):
        """Takes the folder for this process; of a log that is there, the lines up to step iter_num stay.

        Raises UserError if another process is training there, or a tracker does not start.
        """
        self.path, self.trackers = folder / "log.jsonl", {}
        self.unwritten = b""  # lines for which there was no room
        if os.environ.get("RANK", "0") != "0":
            self.file = open(os.devnull, "wb", buffering=0)
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "ab", buffering=0)
        if not file_lock(self.file):
            raise UserError(f"{folder}: another process is training there: wait for it, or choose another --out_dir")
        self.file.truncate(self.end_of(iter_num))
        if settings["tensorboard"]:
            self.trackers["TensorBoard"] = start_tensorboard(folder, iter_num)
        if settings["wandb"]:
            self.trackers["Weights & Biases"] = start_wandb(folder, iter_num, settings)

    def end_of(self, iter_num):
        """The place in the log behind its last line of a step up to iter_num: what comes later will happen again."""
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True) if iter_num else []:
            try:
                later = json.loads(line)["step"] > iter_num
            except (KeyError, RecursionError, TypeError, ValueError):
                later = False  # not a line of ours; it stays
            if later or not line.endswith(b"\n"):
                break
            end += len(line)
        return end

    def log(self, event, iter_num, **facts):
        """A line of log.jsonl. Where there is no room for it, it is written before the next; training goes on."""
        self.unwritten += json.dumps({"event": event, "step": iter_num, **facts}).encode() + b"\n"
        try:
            self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            print0(f"NOT WRITTEN: {self.path} at step {iter_num}: {error.strerror}; training goes on, and tries again")
        numbers = {f"{event}/{name}": fact for name, fact in facts.items() if isinstance(fact, (int, float))}
        for name, track in list(self.trackers.items()):
            try:
                track(numbers, iter_num)
            except Exception as error:  # a full disk, a lost network: no reason to lose a run
                del self.trackers[name]
                print0(f"NOT TRACKED from step {iter_num} on: {name}: {error}; training goes on")


def start_tensorboard(folder, iter_num):
    """A function that gives numbers, by name, and their step to TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder, purge_step=iter_num + 1)  # what came after the checkpoint will happen again

    def track(numbers, step):
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)
        writer.flush()

    return track


def start_wandb(folder, iter_num, settings):
    """A function that gives numbers, by name, and their step to Weights & Biases."""
    import wandb

    id_file = folder / "wandb.id"  # by which a resumed run finds itself again
    known = id_file.read_text() if iter_num and id_file.exists() else None
    try:
        run = wandb.init(name=folder.name, id=known, resume="allow" if known else None, config=settings, dir=folder)
    except Exception as error:  # of no account, no network, ... with types of their own
        raise UserError(f"Weights & Biases does not start: {error}") from None
    id_file.write_text(run.id)
    return lambda numbers, step: run.log(numbers, step=step)
