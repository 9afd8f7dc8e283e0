"""What a comparison says: a table, a sentence for each candidate, verdict.json, and the ledger of all verdicts."""

import csv
import io
import json
import statistics
import time
from contextlib import suppress
from datetime import timedelta

from config.runtime.devices import machine_name
from config.runtime.errors import file_errors
from config.runtime.files import atomic_write
from config.runtime.log import code_version
from frozen import differing_files
from stats import FAILS, NO_LONGER, PAYS, TIE, TIES, UNDECIDED, gain_of, mean, worth

HEADER = ["candidate", "gain at equal steps", "cost: operations, time", "gain at equal cost", "verdict", "seeds"]
RESULTS = ["rate", "seed", "steps", "loss", "logged", "flops", "seconds", "machine", "refused"]
SCHEMA = 1  # of verdict.json
MEANS = {
    PAYS: "trained at equal cost, {base} is worse by {gain}",
    FAILS: "trained for no more than {name} costs, {base} is better by {loss}",
    TIES: f"trained at equal cost, {{base}} differs by less than {TIE} ({{gain}})",
    UNDECIDED: "trained at equal cost, {base} is worse by {gain}, which may be chance",
    NO_LONGER: "longer training makes {base} worse, so use more data or dropout",
}


class Report:
    def __init__(self, comparison):
        self.comparison = comparison
        self.base, *self.candidates = comparison.variants
        self.facts = [self.facts_of(candidate) for candidate in self.candidates]

    def facts_of(self, candidate) -> dict:
        """Return what verdict.json says of a candidate."""
        comparison = self.comparison
        verdict, why, look, judgements = comparison.standing(candidate)
        facts = {"name": candidate.name, "verdict": verdict, "why": why, "seeds": 0, "equal_steps": None, "prices": {}}
        facts |= self.identity(candidate)
        if not judgements:
            return facts
        runs, rungs, level = comparison.losses(candidate, look), comparison.rungs(look), comparison.level
        equal = gain_of(runs, rungs[1.0], comparison.are_paired(candidate, look))
        facts |= {"seeds": len(runs), "equal_steps": {"gain": equal.value, "half": equal.half(level)}}
        for price, judged in judgements.items():
            facts["prices"][price] = {
                "cost": comparison.costs(candidate)[price],
                "verdict": judged.verdict,
                "gain": judged.gain.value,
                "half": judged.gain.half(level),
                "over_the_baseline_at": judged.rung,
                "break_even": mean(rungs[1.0]) - mean(rungs[judged.rung]),
                "worth": worth(mean(runs), rungs),
                "detectable": judged.gain.detectable(level),
            }
        return facts

    def identity(self, variant):
        code = {"words": variant.code or "work tree", "hash": variant.home.name}
        code["differs_in"] = differing_files(variant.home, self.base.home)
        settings = variant.changed(variant.settings)
        return {"code": code, "identity": variant.identity, "settings": settings, "parameters": variant.parameters}

    # -- in words ------------------------------------------------------------------------------------------------

    def table(self):
        return as_table(HEADER, map(self.row, self.candidates, self.facts))

    def row(self, candidate, facts):
        prices = facts["prices"]
        gains, verdicts = [signed(one) for one in prices.values()], [one["verdict"] for one in prices.values()]
        equal = signed(facts["equal_steps"]) if prices else ""
        verdict = by_price(verdicts, prices) if prices else facts["verdict"]
        return [facts["name"], equal, self.cost(candidate), by_price(gains, prices), verdict, str(facts["seeds"])]

    def cost(self, candidate):
        cost, times = f"{candidate.flops / self.base.flops:.2f}", self.comparison.times(candidate)
        if not times:
            return cost if candidate.flops else ""
        ratio = times[0] * candidate.settings["max_iters"] / self.base.settings["max_iters"]
        return f"{cost}, {ratio:.2f} ± {ratio * times[1]:.2f}"

    def sentences(self, candidate, facts):
        """Yield what was found of a candidate, in words."""
        name, base = facts["name"], self.base.name
        if facts["why"]:
            yield f"{name}: {facts['verdict']}: {facts['why']}."
        for price, one in facts["prices"].items():
            loss = signed(one | {"gain": -one["gain"]})
            meaning = MEANS[one["verdict"]].format(name=name, base=base, gain=signed(one), loss=loss)
            yield f"{name}, at {one['cost']:.2f} times the {price}: {one['verdict']}: {meaning}."
        if facts["verdict"] == UNDECIDED and facts["prices"]:
            yield self.what_next(candidate, facts)

    def what_next(self, candidate, facts):
        """Return what it would take to decide about a candidate."""
        comparison, seeds = self.comparison, facts["seeds"]
        later = [look for look in comparison.looks if look > seeds]
        more = later[0] if later else 2 * seeds
        runs = [comparison.run_at(one, 0.0, 0, 1.0) for one in (candidate, self.base)]
        left = timedelta(seconds=round((more - seeds) * sum(map(comparison.run_seconds, runs))))
        least = min(one["detectable"] for one in facts["prices"].values()) * (seeds / more) ** 0.5
        how = "rerun the command" if later else f"--seeds={','.join(map(str, [*comparison.looks, more]))}"
        return f"{more - seeds} more seeds ({left}) would find {least:.3f}: {how}."

    def where(self):
        """Return where a verdict holds."""
        base, settings = self.base, self.base.settings
        tokens = base.tokens_per_step * settings["max_iters"] / base.parameters
        size = f"{settings['n_layer']} layers, width {settings['n_embd']}, {tokens:.2g} tokens per parameter"
        return f"This holds at {size}, on {settings['dataset']}."

    def notes(self):
        """Yield the caveats of the table."""
        missing = self.comparison.missing()
        if missing:
            yield f"{len(missing)} runs are missing, at least"
        if not self.comparison.is_searching():
            yield "no learning rates are tried: a rate unsuited to a length makes the baseline worse there"
        for facts in self.facts:
            files = [file for file in facts["code"]["differs_in"] if file.startswith(("train", "data"))]
            if files:
                yield f"{facts['name']} has its own {', '.join(files)}: its batches and its steps may differ"
            times = facts["parameters"] / self.base.parameters
            if times and abs(times - 1) > 0.2:
                also = "compare it with a wider or narrower baseline (--n_embd) too"
                yield f"{facts['name']} has {times:.2f} times the baseline's parameters: {also}"
        if len(self.candidates) > 4:
            yield "of candidates that gain nothing, 2 to 3% seem to pay: confirm with --first_seed=101"

    def markdown(self, details=False):
        sentences = [text for pair in zip(self.candidates, self.facts) for text in self.sentences(*pair)]
        parts = [self.table(), as_table(["variant", "folder", *RESULTS], self.runs()) if details else ""]
        parts += ["\n".join([*sentences, self.where()]), "\n".join(f"NOTE {line}" for line in self.notes())]
        return "\n\n".join(filter(None, parts)) + "\n"

    def runs(self):
        """Yield a row for each run that has ended."""
        for run, result in self.comparison.results.items():
            yield [run.variant.name, run.folder.name, *(str(result[name]) for name in RESULTS)]

    def lines(self):
        """Yield a line for each candidate, of a fixed form, for programs."""
        for facts in self.facts:
            worst = min(facts["prices"].values(), key=lambda one: one["gain"], default=None)
            gain = f"{worst['gain']:+.4f} ± {worst['half']:.4f}" if worst else "none"
            yield f"VERDICT {facts['verdict']} | {facts['name']} | gain {gain} | seeds {facts['seeds']}"

    # -- files ---------------------------------------------------------------------------------------------------

    def json(self, command, seconds):
        comparison, noise = self.comparison, None
        with suppress(LookupError):  # while its runs are missing
            noise = statistics.stdev(comparison.rungs(0)[1.0].values())
        return {
            "schema": SCHEMA,
            "command": command,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(seconds),
            "machine": machine_name(comparison.device),
            "commit": code_version()["commit"],
            "data": {"dataset": self.base.settings["dataset"], "sha256": comparison.meta["sha256"]},
            "where": self.where(),
            "level": comparison.level,
            "baseline": {"name": self.base.name, "noise": noise} | self.identity(self.base),
            "candidates": self.facts,
        }

    @file_errors()
    def write(self, command, seconds):
        folder, facts = self.comparison.options["out"], self.json(command, seconds)
        rows = io.StringIO()
        csv.writer(rows, lineterminator="\n").writerows([["variant", "folder", *RESULTS], *self.runs()])
        contents = {"table.md": f"    {command}\n\n{self.markdown()}", "runs.csv": rows.getvalue()}
        contents["verdict.json"] = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
        for name, content in contents.items():
            with atomic_write(folder / name) as file:
                file.write(content.encode())
        with open(folder.parent / "verdicts.jsonl", "ab") as ledger:
            ledger.write(json.dumps(facts).encode() + b"\n")
        print(f"saved: {', '.join(str(folder / name) for name in contents)}")


def signed(one):
    """Return a gain ± half the width of its interval, and never -0.000."""
    return f"{round(one['gain'], 3) + 0.0:+.3f} ± {one['half']:.3f}"


def by_price(texts, prices):
    """Return the text of each price, or the one that all have."""
    return texts[0] if len(set(texts)) == 1 else "; ".join(f"{text} by {price}" for text, price in zip(texts, prices))


def as_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
