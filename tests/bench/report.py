"""What a comparison says: a table, a sentence for each candidate, a figure, verdict.json, the ledger of verdicts."""

import csv
import json
import math
import re
from contextlib import suppress

from config.runtime.checkpoints import code_version
from config.runtime.errors import file_errors
from stats import PAYS, UNDECIDED
from variants import differing_files

HEADER = ["candidate", "gain at equal steps", "operations", "time", "gain at equal cost", "verdict", "seeds"]
LEDGER = "verdicts.jsonl"  # all verdicts, next to the folders of the comparisons
COLUMNS = ["variant", "folder", "rate", "seed", "steps", "flops", "loss", "refused", "seconds"]  # of runs.csv
MAY_DIFFER = re.compile(r"model\.py|config/(?!__init__)\w+\.py")  # without a note
SLOWER = 4 / 3  # of a candidate's time over its operations: above that, some may not be counted


class Report:
    def __init__(self, comparison):
        self.comparison, self.base = comparison, comparison.baseline
        comparison.missing()  # decides
        self.facts = [self.facts_of(candidate) for candidate in comparison.candidates]

    def facts_of(self, candidate) -> dict:
        """Return what verdict.json says of a candidate."""
        found, first = self.comparison.standing[candidate], self.comparison.options["first_seed"]
        interval = lambda gain: gain and {"gain": gain.value, "half": gain.half}
        facts = self.identity(candidate) | found._asdict()
        facts |= {"equal_steps": interval(found.equal_steps), "equal_cost": interval(found.equal_cost)}
        if found.verdict == UNDECIDED:
            facts["why"] = found.why or self.what_next(found)
        facts["looks"] = [(first, seeds) for seeds in self.comparison.looks if seeds <= found.seeds]
        facts["level"] = self.comparison.level(candidate)
        facts["operations"] = candidate.flops / self.base.flops or None
        return facts

    def identity(self, variant):
        code = {"hash": variant.home.name, "differs_in": differing_files(variant.home, self.base.home)}
        return {"name": variant.name, "identity": variant.identity, "code": code}

    def what_next(self, found):
        """Return what would decide about a candidate."""
        looks, seeds = self.comparison.looks, found.seeds
        if not seeds:
            return f"{len(self.comparison.results)} runs have ended, too few for its first look: rerun the command"
        needed = found.equal_cost.needed(seeds)
        how = "rerun the command" if looks[-1] > seeds else f"--seeds={','.join(map(str, [*looks, needed]))}"
        return f"{needed - seeds} more seeds would decide if this gain stays: {how}"

    def row(self, facts):
        operations, seconds = (f"{facts[name]:.2f}" if facts[name] else "" for name in ("operations", "seconds"))
        equal, gain = signed(facts["equal_steps"]), signed(facts["equal_cost"])
        return [facts["name"], equal, operations or "not known", seconds, gain, facts["verdict"], str(facts["seeds"])]

    def notes(self):
        """Yield the caveats of the table."""
        comparison = self.comparison
        if not comparison.searches:
            yield "learning rates are not tuned: one unsuited to a length weakens the baseline there"
        said = {(run.variant.name, note) for run, result in comparison.results.items() for note in result["notes"]}
        yield from (f"{name}: {note}" for name, note in sorted(said))
        for candidate, facts in zip(comparison.candidates, self.facts):
            name, seconds, operations = (facts[key] for key in ("name", "seconds", "operations"))
            files = [file for file in facts["code"]["differs_in"] if not MAY_DIFFER.fullmatch(file)]
            if files:
                yield f"{name} has its own {', '.join(files)}: what a step, a batch or the text is may differ"
            if seconds and seconds > SLOWER * operations:
                ratios = f"{seconds:.2f} times the time for {operations:.2f} times the operations"
                yield f"{name} takes {ratios}: something may not be counted"
            if looks := len(comparison.others(candidate)):
                yield f"{looks} earlier looks at {name} count ({LEDGER}): its interval is one of {facts['level']:.1%}"

    def markdown(self):
        sentences = [f"{facts['name']}: {facts['verdict']}: {facts['why']}." for facts in self.facts if facts["why"]]
        settings = self.base.settings
        tokens = math.prod(settings[name] for name in ("max_iters", "batch_size", "grad_accum_steps", "block_size"))
        size = f"{settings['n_layer']} layers, width {settings['n_embd']}, {tokens / self.base.parameters:.2g} tokens"
        sentences.append(f"Compared at {size} per parameter, on {settings['dataset']}.")
        paragraphs = sentences, [f"NOTE {line}" for line in self.notes()]
        return "\n\n".join([as_table(HEADER, map(self.row, self.facts)), *map("\n".join, paragraphs)]).strip() + "\n"

    def lines(self):
        """Yield a line for each candidate, of a fixed form, for programs."""
        for facts in self.facts:
            gain = signed(facts["equal_cost"]) or "none"
            yield f"VERDICT {facts['verdict']} | {facts['name']} | gain {gain} | seeds {facts['seeds']}"

    @file_errors()
    def write(self, folder, command, machine):
        facts = {
            "schema": 2,
            "command": command,
            "machine": machine,
            "commit": code_version()["commit"],
            "data": {"dataset": self.base.settings["dataset"], "sha256": self.comparison.tokens},
            "baseline": self.identity(self.base),
            "candidates": self.facts,
        }
        (folder / "table.md").write_text(f"    {command}\n\n{self.markdown()}", encoding="utf-8")
        (folder / "verdict.json").write_text(json.dumps(facts, indent=1) + "\n")
        with open(folder.parent / LEDGER, "a") as ledger:
            ledger.write(json.dumps(facts) + "\n")
        with open(folder / "runs.csv", "w", encoding="utf-8", newline="") as file:
            rows = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
            rows.writeheader()
            for run, result in self.comparison.results.items():
                names = {"variant": run.variant.name, "folder": run.folder.name, "flops": run.flops}
                rows.writerow(vars(run) | names | result)
        self.draw(folder / "figure.png")
        figure = ", figure.png" if (folder / "figure.png").exists() else ""
        print(f"saved: {folder}/table.md, verdict.json, runs.csv{figure}")

    def draw(self, path):
        """Draw the gains at equal cost. An earlier figure at `path` is removed."""
        from matplotlib.figure import Figure

        path.unlink(missing_ok=True)
        drawn = [facts for facts in self.facts if facts["equal_cost"]]
        if not drawn:
            return
        figure = Figure(figsize=(7, 1.3 + 0.4 * len(drawn)), layout="constrained")
        axis = figure.subplots()
        gains, halves = zip(*(facts["equal_cost"].values() for facts in drawn))
        axis.errorbar(gains, range(len(drawn)), xerr=halves, fmt="o", capsize=2.5)
        axis.axvline(0, color="gray")
        labels = [f"{facts['name']}: {facts['verdict']}" for facts in drawn]
        axis.set_yticks(range(len(drawn)), labels, parse_math=False)
        axis.invert_yaxis()
        axis.set_xlabel(f"gain at equal cost over {self.base.name} (nats per token)", parse_math=False)
        figure.savefig(path)


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
                    taken = [(first, n) for first, n in one["looks"] if one["verdict"] != PAYS or first == first_seed]
                    looks.setdefault(one["identity"], set()).update(taken)
    return looks


def signed(interval):
    return f"{interval['gain']:+.4f} ± {interval['half']:.4f}" if interval else ""


def as_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
