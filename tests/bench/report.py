"""What a comparison says: a table, a sentence for each candidate, verdict.json, and the ledger of all verdicts."""

import csv
import io
import json
import re
import time
from contextlib import suppress
from datetime import timedelta

from config.runtime.devices import machine_name
from config.runtime.errors import file_errors
from config.runtime.files import atomic_write
from config.runtime.run import code_version
from stats import PAYS, UNDECIDED
from variants import differing_files

HEADER = ["candidate", "gain at equal steps", "operations", "time", "gain at equal cost", "verdict", "seeds"]
SCHEMA = 2  # of verdict.json
LEDGER = "verdicts.jsonl"  # all verdicts, next to the folders of the comparisons
OF_RUN = ["rate", "seed", "steps", "flops"]  # columns of runs.csv
OF_RESULT = ["loss", "logged", "refused", "seconds", "machine"]
MAY_DIFFER = re.compile(r"model\.py|config/(?!__init__)\w+\.py")  # without a note
SLOWER = 4 / 3  # of a candidate's time over its operations: above that, some may not be counted


class Report:
    def __init__(self, comparison):
        self.comparison, self.base = comparison, comparison.baseline
        comparison.missing()  # decides
        self.facts = [self.facts_of(candidate) for candidate in comparison.candidates]

    def facts_of(self, candidate) -> dict:
        """Return what verdict.json says of a candidate."""
        found, level = self.comparison.standing.get(candidate), self.comparison.level(candidate)
        facts = self.identity(candidate) | {"verdict": UNDECIDED, "why": "", "seeds": 0, "looks": [], "level": level}
        facts |= {"operations": None, "seconds": None, "equal_steps": None, "equal_cost": None}
        if candidate.flops_per_step:
            facts["operations"] = candidate.flops / self.base.flops
        if candidate in self.comparison.trouble:
            facts["verdict"], facts["why"] = self.comparison.trouble[candidate]
        elif found:
            interval = lambda gain: gain and {"gain": gain.value, "half": gain.half(level)}
            facts |= {"verdict": found.judged.verdict, "seeds": len(found.losses), "seconds": found.seconds}
            facts |= {"equal_steps": interval(found.equal), "equal_cost": interval(found.judged.gain)}
            facts["equal_cost"]["over_the_baseline_at"] = found.judged.rung
            first = self.comparison.options["first_seed"]
            facts["looks"] = [(first, seeds) for seeds in self.comparison.looks if seeds <= facts["seeds"]]
            if facts["verdict"] == UNDECIDED:
                facts["why"] = self.what_next(facts, found.judged.gain)
        else:
            facts["why"] = self.how_far(candidate)
        return facts

    def identity(self, variant):
        code = {"words": variant.code or "working tree", "hash": variant.home.name}
        code["differs_in"] = differing_files(variant.home, self.base.home)
        facts = {"identity": variant.identity, "settings": variant.changed, "parameters": variant.parameters}
        return {"name": variant.name, "code": code} | facts

    def what_next(self, facts, gain):
        """Return how many more seeds would decide about a candidate."""
        looks, seeds = self.comparison.looks, facts["seeds"]
        needed = gain.needed(seeds, facts["level"])
        flops = (needed - seeds) * self.base.flops * (1 + facts["operations"])
        left = timedelta(seconds=round(self.comparison.run_seconds(flops)))
        how = "rerun the command" if looks[-1] > seeds else f"--seeds={','.join(map(str, [*looks, needed]))}"
        return f"{needed - seeds} more seeds ({left} of one worker) would decide if this gain stays: {how}"

    def how_far(self, candidate):
        """Return which runs have ended where there are too few for a first look."""
        told = []
        for variant in (self.base, candidate):
            runs = [run for run in self.comparison.results if run.variant is variant]
            rates = ", ".join(sorted({f"{run.rate:g}" for run in runs})) or "none"
            told.append(f"{variant.name}: {len(runs)}, at rates {rates}")
        return f"its first look needs more runs ({'; '.join(told)}): rerun the command"

    # -- in words ------------------------------------------------------------------------------------------------

    def table(self):
        return as_table(HEADER, map(self.row, self.facts))

    def row(self, facts):
        operations, seconds = (f"{facts[name]:.2f}" if facts[name] else "" for name in ("operations", "seconds"))
        equal, gain = signed(facts["equal_steps"]), signed(facts["equal_cost"])
        cost = operations or "not known"
        return [facts["name"], equal, cost, seconds, gain, facts["verdict"], str(facts["seeds"])]

    def where(self):
        """Return where a verdict holds."""
        base, settings = self.base, self.base.settings
        tokens = settings["max_iters"] / base.parameters
        for name in ("batch_size", "grad_accum_steps", "block_size"):
            tokens *= settings[name]
        size = f"{settings['n_layer']} layers, width {settings['n_embd']}, {tokens:.2g} tokens per parameter"
        return f"This holds at {size}, on {settings['dataset']}."

    def notes(self):
        """Yield the caveats of the table."""
        comparison = self.comparison
        if not comparison.searches:
            yield "learning rates are not tuned: one unsuited to a length weakens the baseline there"
        if any(found.paired for found in comparison.standing.values()):
            yield "seeds shift all losses alike (F test), so equal seeds are compared and intervals are narrower"
        said = {(run.variant.name, note) for run, result in comparison.results.items() for note in result["notes"]}
        said |= {(variant.name, note) for variant in comparison.variants for note in variant.notes}
        yield from (f"{name}: {note}" for name, note in sorted(said))
        for candidate, facts in zip(comparison.candidates, self.facts):
            name, seconds, operations = facts["name"], facts["seconds"] or 0, facts["operations"] or 0
            files = [file for file in facts["code"]["differs_in"] if not MAY_DIFFER.fullmatch(file)]
            if files:
                yield f"{name} has its own {', '.join(files)}: what a step, a batch or the text is may differ"
            if seconds > SLOWER * operations:
                ratios = f"{seconds:.2f} times the time for {operations:.2f} times the operations"
                yield f"{name} takes {ratios}: something may not be counted"
            if looks := len(comparison.others(candidate)):
                yield f"{looks} earlier looks at {name} count ({LEDGER}): its interval is one of {facts['level']:.1%}"
            times = facts["parameters"] / self.base.parameters
            if times and abs(times - 1) > 0.2:
                yield f"{name} has {times:.2f} times the baseline's parameters: compare it with another --n_embd too"
        if len(self.facts) > 4:
            yield "about 3% of useless candidates seem to pay: confirm with --first_seed=101"

    def markdown(self):
        sentences = [f"{facts['name']}: {facts['verdict']}: {facts['why']}." for facts in self.facts if facts["why"]]
        notes = [f"NOTE {line}" for line in self.notes()]
        where = [self.where()] if self.comparison.standing else []
        return f"{self.table()}\n\n" + "\n".join([*sentences, *where, "", *notes]).strip() + "\n"

    def lines(self):
        """Yield a line for each candidate, of a fixed form, for programs."""
        for facts in self.facts:
            one = facts["equal_cost"]
            gain = f"{one['gain']:+.4f} ± {one['half']:.4f}" if one else "none"
            yield f"VERDICT {facts['verdict']} | {facts['name']} | gain {gain} | seeds {facts['seeds']}"

    # -- files ---------------------------------------------------------------------------------------------------

    @file_errors()
    def write(self, folder, command, device, seconds):
        facts = {
            "schema": SCHEMA,
            "command": command,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(seconds),
            "machine": machine_name(device),
            "commit": code_version()["commit"],
            "data": {"dataset": self.base.settings["dataset"], "sha256": self.comparison.tokens},
            "where": self.where(),
            "baseline": self.identity(self.base),
            "candidates": self.facts,
        }
        contents = {"table.md": f"    {command}\n\n{self.markdown()}", "runs.csv": as_csv(self.comparison.results)}
        contents["verdict.json"] = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
        for name, content in contents.items():
            with atomic_write(folder / name) as file:
                file.write(content.encode())
        with open(folder.parent / LEDGER, "ab") as ledger:
            ledger.write(json.dumps(facts).encode() + b"\n")
        print(f"saved: {', '.join(str(folder / name) for name in contents)}")


@file_errors()
def earlier_looks(ledger, baseline, tokens, first_seed):
    """Return {identity: its looks, (first seed, seeds)} of all that was compared with this baseline on this text.

    What paid on other seeds is left out: new seeds confirm it.
    """
    looks = {}
    for line in ledger.read_bytes().splitlines() if ledger.exists() else []:
        with suppress(LookupError, ValueError):  # a line that a kill has torn, or of another schema
            row = json.loads(line)
            if (row["baseline"]["identity"], row["data"]["sha256"]) == (baseline.identity, tokens):
                for one in row["candidates"]:
                    new = {look for look in map(tuple, one["looks"]) if one["verdict"] != PAYS or look[0] == first_seed}
                    looks[one["identity"]] = looks.get(one["identity"], set()) | new
    return looks


def as_csv(results):
    """Return a row for each run that has ended."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["variant", "folder", *OF_RUN, *OF_RESULT])
    for run, result in results.items():
        numbers = [getattr(run, name) for name in OF_RUN] + [result[name] for name in OF_RESULT]
        rows.writerow([run.variant.name, run.folder.name, *numbers])
    return text.getvalue()


def signed(one):
    """Return a gain ± half the width of its interval, and never -0.000."""
    return f"{round(one['gain'], 3) + 0.0:+.3f} ± {one['half']:.3f}" if one else ""


def as_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
