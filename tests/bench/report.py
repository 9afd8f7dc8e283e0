"""What a comparison says: a table, a sentence for each candidate, verdict.json, and the ledger of all verdicts."""

import csv
import io
import json
import statistics
import time
from datetime import timedelta

from config.runtime.devices import machine_name
from config.runtime.errors import file_errors
from config.runtime.files import atomic_write
from config.runtime.run import code_version
from frozen import differing_files
from stats import FAILS, NO_LONGER, PAYS, TIE, TIES, UNDECIDED, mean, worth

HEADER = ["candidate", "gain at equal steps", "cost: operations, time", "gain at equal cost", "verdict", "seeds"]
SCHEMA = 1  # of verdict.json
LEDGER = "verdicts.jsonl"  # all verdicts, next to the folders of the comparisons
OF_RUN = ["rate", "seed", "steps", "flops"]  # columns of runs.csv
OF_RESULT = ["loss", "logged", "refused", "train_seconds", "machine"]
MEANS = {
    PAYS: "trained at equal cost, {base} is worse by {gain}",
    FAILS: "at no more than {name}'s cost, {base} is better by {loss}",
    TIES: f"trained at equal cost, {{base}} differs by less than {TIE} ({{gain}})",
    UNDECIDED: "the gain over {base}, trained at equal cost, is {gain}, which may be chance",
    NO_LONGER: "longer training makes {base} worse, so use more data or dropout",
}


class Report:
    def __init__(self, comparison):
        self.comparison, self.base = comparison, comparison.baseline
        comparison.missing()  # decides
        self.facts = [self.facts_of(candidate) for candidate in comparison.candidates]

    def facts_of(self, candidate) -> dict:
        """Return what verdict.json says of a candidate."""
        facts = self.identity(candidate) | {
            "operations": candidate.flops / self.base.flops,
            "verdict": UNDECIDED,
            "why": "",
            "seeds": 0,
            "equal_steps": None,
            "times": None,
            "prices": {},
        }
        found = self.comparison.standing.get(candidate)
        if candidate in self.comparison.trouble:
            facts["verdict"], facts["why"] = self.comparison.trouble[candidate]
        elif found:
            facts |= {"verdict": found.verdict, "seeds": len(found.losses), "times": found.times}
            facts["equal_steps"] = self.interval(found.equal)
            for price, judged in found.judgements.items():
                trained = {cost: losses for cost, losses in self.comparison.ladder.items() if losses}
                trained |= judged.rungs | {1.0: found.base}
                facts["prices"][price] = self.interval(judged.gain) | {
                    "cost": found.costs[price],
                    "verdict": judged.verdict,
                    "over_the_baseline_at": judged.rung,
                    "break_even": mean(found.base) - mean(judged.rungs[judged.rung]),
                    "worth": worth(mean(found.losses), trained),
                    "detectable": judged.gain.detectable(self.comparison.level),
                }
        if facts["verdict"] == UNDECIDED:
            facts["why"] = self.what_next(facts)
        return facts

    def interval(self, gain):
        return {"gain": gain.value, "half": gain.half(self.comparison.level)}

    def identity(self, variant):
        code = {"words": variant.code or "working tree", "hash": variant.home.name}
        code["differs_in"] = differing_files(variant.home, self.base.home)
        settings = variant.changed(variant.settings)
        facts = {"identity": variant.identity, "settings": settings, "parameters": variant.parameters}
        return {"name": variant.name, "code": code} | facts

    # -- in words ------------------------------------------------------------------------------------------------

    def table(self):
        return as_table(HEADER, map(self.row, self.facts))

    def row(self, facts):
        prices, cost = facts["prices"], f"{facts['operations']:.2f}" if facts["operations"] else ""
        if not prices:
            return [facts["name"], "", cost, "", facts["verdict"], "0"]
        if facts["times"]:
            ratio, spread = facts["times"]
            cost += f", {ratio:.2f} ± {ratio * spread:.2f}"
        gains = [signed(one) for one in prices.values()]
        verdicts = [one["verdict"] for one in prices.values()]
        equal = signed(facts["equal_steps"])
        return [facts["name"], equal, cost, by_price(gains, prices), by_price(verdicts, prices), str(facts["seeds"])]

    def sentences(self, facts):
        """Yield what was found of a candidate, in words."""
        name, base = facts["name"], self.base.name
        if facts["why"]:
            yield f"{name}: {facts['verdict']}: {facts['why']}."
        for price, one in facts["prices"].items():
            loss = signed(one | {"gain": -one["gain"]})
            meaning = MEANS[one["verdict"]].format(name=name, base=base, gain=signed(one), loss=loss)
            yield f"{name}, at {one['cost']:.2f} times the {price}: {one['verdict']}: {meaning}."
        if facts["prices"] and "time" not in facts["prices"] and self.comparison.options["cost"] == "both":
            chance, apart = "the difference from operations may be chance", "they did not train alternately"
            yield f"{name}, {base}: not judged by time: {chance if facts['times'] else apart}."

    def what_next(self, facts):
        """Return what it would take to decide about a candidate."""
        looks, seeds = self.comparison.looks, facts["seeds"]
        if not seeds:
            return "its first look needs runs that have not ended: rerun the command"
        more = min((look for look in looks if look > seeds), default=2 * seeds)
        flops = self.base.flops * (1 + facts["operations"])
        left = timedelta(seconds=round((more - seeds) * self.comparison.run_seconds(flops)))
        how = "rerun the command" if more in looks else f"--seeds={','.join(map(str, [*looks[-4:], more]))}"
        least = max(one["detectable"] for one in facts["prices"].values()) * (seeds / more) ** 0.5
        return f"{more - seeds} more seeds ({left} of one worker) would detect {least:.3f}: {how}"

    def where(self):
        """Return where a verdict holds."""
        base, settings = self.base, self.base.settings
        tokens = base.tokens_per_step * settings["max_iters"] / base.parameters
        size = f"{settings['n_layer']} layers, width {settings['n_embd']}, {tokens:.2g} tokens per parameter"
        return f"This holds at {size}, on {settings['dataset']}."

    def notes(self):
        """Yield the caveats of the table."""
        if not self.comparison.searches:
            yield "learning rates are not tuned: one unsuited to a length weakens the baseline there"
        if any(found.paired for found in self.comparison.standing.values()):
            yield "seeds shift all losses alike (F test), so equal seeds are compared and intervals are narrower"
        said = {(run.variant.name, note) for run, result in self.comparison.results.items() for note in result["notes"]}
        for name, note in sorted(said):
            yield f"train.py, on {name}: {note}"
        for facts in self.facts:
            files = [file for file in facts["code"]["differs_in"] if file.startswith(("train", "data"))]
            if files:
                yield f"{facts['name']} has its own {', '.join(files)}: its batches and its steps may differ"
            times = facts["parameters"] / self.base.parameters
            if times and abs(times - 1) > 0.2:
                also = "compare it with a wider or narrower baseline (--n_embd) too"
                yield f"{facts['name']} has {times:.2f} times the baseline's parameters: {also}"
        if len(self.facts) > 4:
            yield "about 3% of useless candidates seem to pay: confirm with --first_seed=101"

    def markdown(self):
        sentences = [sentence for facts in self.facts for sentence in self.sentences(facts)]
        notes = [f"NOTE {line}" for line in self.notes()]
        where = [self.where()] if self.comparison.standing else []
        return f"{self.table()}\n\n" + "\n".join([*sentences, *where, "", *notes]).strip() + "\n"

    def lines(self):
        """Yield a line for each candidate, of a fixed form, for programs."""
        for facts in self.facts:
            worst = min(facts["prices"].values(), key=lambda one: one["gain"], default=None)
            gain = f"{worst['gain']:+.4f} ± {worst['half']:.4f}" if worst else "none"
            yield f"VERDICT {facts['verdict']} | {facts['name']} | gain {gain} | seeds {facts['seeds']}"

    # -- files ---------------------------------------------------------------------------------------------------

    @file_errors()
    def write(self, folder, command, device, seconds):
        found = self.comparison.standing.values()
        groups = [group.values() for one in found for group in (one.losses, one.base)]
        noise = statistics.fmean(map(statistics.variance, groups)) ** 0.5 if groups else None
        facts = {
            "schema": SCHEMA,
            "command": command,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(seconds),
            "machine": machine_name(device),
            "commit": code_version()["commit"],
            "data": {"dataset": self.base.settings["dataset"], "sha256": self.comparison.tokens},
            "where": self.where(),
            "level": self.comparison.level,
            "baseline": {"noise": noise} | self.identity(self.base),
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
    return f"{round(one['gain'], 3) + 0.0:+.3f} ± {one['half']:.3f}"


def by_price(texts, prices):
    """Return the text of each price, or the one that all have."""
    return texts[0] if len(set(texts)) == 1 else "; ".join(f"{text} by {price}" for text, price in zip(texts, prices))


def as_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
