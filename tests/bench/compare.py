"""
Does it pay? Compare variants with a baseline on any text, each at its best learning rate, for the same compute:

    python tests/bench/compare.py --against=HEAD "edit:"                                     # my edit of model.py
    python tests/bench/compare.py config/standard_shakespeare.py "kept: config/m1_shakespeare.py --keep_input"

Every argument is a variant, written as for train.py, quoted if it has several words; "NAME: ..." names it. The first
is the baseline. Settings outside quotes apply to all. Rerun the command to continue: finished runs are kept
while the code is the same.
"""

against = ""  # a commit, such as HEAD: the baseline is the first variant as that commit has it
out = "out/compare"  # folder of the copies of the code and the runs
tune = True  # search for each variant's best learning rate, starting at its own
seeds = 5  # runs of each variant at its best rate
first_seed = 1  # 101, for example, confirms a verdict on new seeds; the search uses the seed before
workers = 0  # runs at a time, with a thread each; 0: one for each core that this process may use; on a GPU, use 1

import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from itertools import repeat
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config import UserError, atomic_write, check_min, configure, file_lock, read_settings
from data.prepare import ensure_prepared

VERDICTS = ("does not pay", "undecided", "tie", "pays")  # from the worst to the best
Variant = namedtuple("Variant", "name home settings")  # home: the copy of its code; settings: all of its train.py's


def read_variant(words, common, home):
    """Return the Variant of an argument. Its config files are those of its code."""
    name, _, rest = f"{words} ".rpartition(": ")
    own = [str(home / word) if (home / word).is_file() else word for word in rest.split()]
    try:
        settings = read_settings(home / "train.py", [*common, *own])
    except UserError as error:
        raise UserError(f"{name or words}: {error}") from None
    if taken := settings.given.keys() & {"seed", "out_dir", "init_from", "eval_only"}:
        raise UserError(f"leave out {', '.join(sorted(taken))}, which a comparison sets itself")
    return Variant(name or words, home, settings.values)


def own_files():
    """Return the paths of the code in the working tree: .py files that git does not ignore, or without git, ours."""
    command = ["git", "--git-dir=.git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    with suppress(OSError):
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
        if listed.returncode == 0:
            return [ROOT / name for name in listed.stdout.split("\0")[:-1] if (ROOT / name).is_file()]
    return [path for pattern in ("*.py", "config/**/*.py", "data/**/*.py", "tests/*.py") for path in ROOT.glob(pattern)]


def copy_code(commit, folder, changes=()):
    """Copy the code of a commit, or of the working tree. The copy's name is the hash of all but the tests.

    `changes` are files, {name: content}, that the copy has instead of its own.
    """
    if commit:
        done = subprocess.run(["git", "archive", commit, "*.py"], cwd=ROOT, capture_output=True)
        if done.returncode:
            raise UserError(f"against = {commit!r} is no commit here: {done.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            files = {one.name: tar.extractfile(one).read() for one in tar if one.isfile()}
    else:
        files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in own_files()}
    files |= changes
    code = sorted(item for item in files.items() if not item[0].startswith("tests/"))
    home = folder / hashlib.sha256(repr(code).encode()).hexdigest()[:12]
    for name, content in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)
    return home


def difference(losses, base):
    """Return how much higher a candidate's loss is, by Welch's t test, and the verdict. The same runs have no noise."""
    from scipy.stats import ttest_ind

    low, high = (0.0, 0.0) if losses == base else ttest_ind(losses, base, equal_var=False).confidence_interval(0.95)
    shown = f"{(low + high) / 2:+.4f} ± {(high - low) / 2:.4f}"
    if low > 0 or high < 0:
        return shown, "pays" if high < 0 else "does not pay"
    return shown, "tie" if low > -0.02 and high < 0.02 else "undecided"  # nats


def search(new, losses_of):
    """Return the best rate and {rate: loss} of the `new` ones, and more, by factors of 2, until it has neighbors."""
    grid = {}
    while len(grid) < 24:
        grid |= zip(new, losses_of(new))
        best = min(sorted(grid), key=grid.get)  # of equal ones the lowest, so where all runs diverge the rate falls
        if min(grid) < best < max(grid):
            return best, grid
        new = [best / 2 if best == min(grid) else 2 * best]
    raise UserError(f"of {len(grid)} learning rates the last, {best:g}, is the best")


class Comparison:
    """Training runs, several at a time, none twice, and what they say of variants."""

    def __init__(self, folder, dataset, options):
        self.folder, self.dataset, self.searches = folder, dataset, options["tune"]
        self.seeds = range(options["first_seed"], options["first_seed"] + options["seeds"])
        # under taskset or Slurm, a process may use fewer cores than the machine has
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.pool, self.processes = ThreadPoolExecutor(options["workers"] or cores), set()

    def run(self, label, *command):
        """Run a Python program. Raise a UserError if it fails, unless it is a run that diverges."""
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "start_new_session": True}
        how["env"] = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, *map(str, command)], **how)
        self.processes.add(process)
        output, _ = process.communicate()
        self.processes.remove(process)
        if process.returncode and "the run has diverged" not in output:
            if "Traceback" in output:
                print(f"{label}:\n{output}", end="", file=sys.stderr, flush=True)
            raise UserError(f"{label}: exit code {process.returncode}: {' '.join(output.splitlines()[-1:]):.200}")

    def stop(self):
        """Let the runs save and end. A terminal's Ctrl-C does not reach their sessions, so they hear of it once."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.processes:
            print("stopping, once the runs have saved: rerun the command to continue", flush=True)
        for process in list(self.processes):
            process.terminate()
        self.pool.shutdown()

    def train(self, variant, rate, seed):
        """Return the loss of a run and its operations. Its folder is named after all that it depends on."""
        settings = variant.settings | {"learning_rate": rate, "seed": seed, "dataset": str(self.dataset)}
        facts = variant.home.name, sorted(settings.items()), (self.dataset / "meta.json").read_bytes()
        folder, steps = self.folder / hashlib.sha256(repr(facts).encode()).hexdigest()[:12], settings["max_iters"]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as file:
            file_lock(file, wait=True)  # two candidates may need the same run
            if not (folder / "result.json").exists():
                label = f"{variant.name}, rate {rate:g}, seed {seed}, {steps:,} steps"
                options = settings | {"out_dir": folder, "init_from": "auto", "eval_interval": steps}
                self.run(label, variant.home / "train.py", *(f"--{name}={value}" for name, value in options.items()))
                log = {line["event"]: line for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines())}
                assert "diverged" in log or log["eval"]["step"] == steps, f"{folder} was trained by others"
                loss = math.inf if "diverged" in log else log["eval"]["val_loss"] or math.inf
                sizes = "batch_size", "gradient_accumulation_steps", "block_size"
                tokens = steps * math.prod(settings[name] for name in sizes)
                result = loss, tokens * (log["start"]["flops_per_token"] or math.nan)
                with atomic_write(folder / "result.json") as written:
                    written.write(json.dumps(result).encode())
                print(f"{label}: loss {loss:.4f} ({folder})\n", end="", flush=True)  # in one piece
                for path in folder.glob("*.pt"):
                    path.unlink()
        return json.loads((folder / "result.json").read_text())

    def best_rate(self, variant):
        """Return the vertex of the parabola through the best rate and its neighbors, over the logarithm of the rate."""
        rate, seed = variant.settings["learning_rate"], self.seeds[0] - 1
        losses_of = lambda rates: [loss for loss, _ in self.pool.map(self.train, repeat(variant), rates, repeat(seed))]
        best, grid = search([rate / 2, rate, 2 * rate], losses_of)
        low, least, high = (grid[rate] for rate in (best / 2, best, 2 * best))
        shift = (low - high) / (low - 2 * least + high) / 2 if max(low, high) < math.inf else 0
        return float(f"{best * 2**shift:.2g}")

    def measure(self, variant):
        """Return the losses of a variant's seeds and the operations of a run, if verify.py finds that nothing leaks."""
        verify = variant.home / "tests/verify.py", "Causality", json.dumps(variant.settings)
        self.run(f"{variant.name}, verify.py", *verify)
        rate = self.best_rate(variant) if self.searches else variant.settings["learning_rate"]
        losses, costs = zip(*self.pool.map(self.train, repeat(variant), repeat(rate), self.seeds))
        if not math.isfinite(sum(losses + costs)):
            raise UserError(f"{variant.name}: diverged at rate {rate:g}, or its operations cannot be counted")
        return losses, costs[0]

    def judge(self, candidate, baseline, found, base_found):
        """Return a candidate's row of the table. A costlier one must win after the same steps, and the same compute."""
        base, base_cost = base_found.result()
        try:
            losses, cost = found.result()
        except UserError as why:
            return [candidate.name, "", "", "", f"left out: {why}"]
        (same_steps, verdict), ratio = difference(losses, base), cost / base_cost
        same_compute = same_steps if 0.98 <= ratio <= 1.02 else ""
        if not same_compute and (ratio < 1 or verdict != "does not pay"):
            steps, warmup = (baseline.settings[name] for name in ("max_iters", "warmup_iters"))
            as_costly = {"max_iters": round(ratio * steps), "warmup_iters": round(ratio * warmup) or warmup}
            base, _ = self.measure(baseline._replace(settings=baseline.settings | as_costly))
            same_compute, last = difference(losses, base)
            verdict = min(verdict, last, key=VERDICTS.index) if ratio > 1 else last
        return [candidate.name, f"{ratio:.2f}", same_steps, same_compute, verdict]


def as_table(header, rows):
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])


def main(argv):
    names = ["-h", "--help", *(f"--{name}" for name in read_settings(__file__, []).values)]
    own = [word for word in argv if word.partition("=")[0] in names]
    common = [word for word in argv if word.startswith("--") and word not in own]  # options for all variants
    words = [word for word in argv if word not in own + common]
    options = configure(__file__, own).values
    out, against = Path(options["out"]).resolve(), options["against"]
    check_min(options, "seeds", 2)
    check_min(options, "first_seed", 1)
    check_min(options, "workers", 0)
    pairs = [("", one) for one in words]
    if against and words:
        pairs.insert(0, (against, f"{against}: {words[0]}"))
    if len(pairs) < 2:
        raise UserError("name two variants, or --against=HEAD and one, as in compare.py --against=HEAD 'edit:'")
    variants = [read_variant(one, common, copy_code(commit, out / "code")) for commit, one in pairs]
    if len({(variant.home, str(variant.settings)) for variant in variants}) < len(variants):
        raise UserError("two variants are the same: save your edit, or name another commit")
    equal = "dataset", "block_size", "eval_tokens", "max_iters"
    if differing := [name for name in equal if len({variant.settings[name] for variant in variants}) > 1]:
        raise UserError(f"{', '.join(differing)}: variants are comparable only with the same")
    if common:
        print(f"for all variants: {' '.join(common)}", flush=True)
    import_module("scipy")  # an error now, and not after hours of runs
    comparison = Comparison(out / "runs", ensure_prepared(variants[0].settings["dataset"]).resolve(), options)
    threads = ThreadPoolExecutor(2 * len(variants))
    try:
        first, *others = [threads.submit(comparison.measure, variant) for variant in variants]
        rows = [*threads.map(comparison.judge, variants[1:], repeat(variants[0]), others, repeat(first))]
    finally:
        comparison.stop()
    print("\n" + as_table(["variant", "compute", "loss, same steps", "loss, same compute", "verdict"], rows))
    return int(any("left out" in row[-1] for row in rows))


if __name__ == "__main__":
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # as at Ctrl-C, runs save and end
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
