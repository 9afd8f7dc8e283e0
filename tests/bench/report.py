"""What a comparison says: a table, a sentence for each candidate, verdict.json, and the ledger of all verdicts."""

import csv
import io
import json
import statistics
import time

from config.runtime.devices import machine_name
from config.runtime.errors import clock, file_errors
from config.runtime.files import atomic_write
from config.runtime.log import code_version
from frozen import differing_files
from plan import SAME
from stats import FAILS, NO_LONGER, PAYS, TIES, UNDECIDED, detectable, gain_of, mean, worth

HEADER = ["candidate", "gain at equal steps", "cost: operations, time", "gain at equal cost", "verdict", "seeds"]
DETAILS = ["variant", "parameters", "learning rate", "steps", "loss", "± between seeds"]
SCHEMA = 1  # of verdict.json
MEANS = {
    PAYS: "{name} pays: {by} it beats {base} trained at equal cost, by {gain} nats per token",
    FAILS: "{name} does not pay: {by} {base}, trained for no more than {name} costs, is better by {gain} nats per token",
    TIES: "{name} ties: {by} it differs from {base} trained at equal cost by less than 0.02 nats ({gain})",
    UNDECIDED: "{name} is undecided: {by} the gain at equal cost is {gain}, which may be chance",
    NO_LONGER: "{name} cannot be judged: {by} longer training makes {base} worse; use more data, or dropout",
}


class Report:
    def __init__(self, comparison):
        self.comparison = comparison
        self.base, self.candidates = comparison.baseline, comparison.variants[1:]
        self.found = {one: comparison.standing(one) for one in self.candidates if one not in comparison.trouble}

    def verdict(self, candidate):
        if candidate in self.comparison.trouble:
            return self.comparison.trouble[candidate][0]
        found = self.found[candidate]
        return self.comparison.verdict(candidate, found[0]) if found else UNDECIDED

    def verdicts(self):
        return [self.verdict(one) for one in self.candidates]

    def facts(self, candidate) -> dict:
        """Return what verdict.json says of a candidate."""
        comparison, verdict = self.comparison, self.verdict(candidate)
        facts = {"name": candidate.name, "verdict": verdict, "why": comparison.trouble.get(candidate, ("", ""))[1]}
        facts |= self.identity(candidate) | {"seeds": 0, "equal_steps": None, "prices": {}}
        if not self.found.get(candidate):
            return facts
        look, judgements = self.found[candidate]
        runs, rungs, level = comparison.losses(candidate, look), comparison.rungs(look), comparison.level
        paired = comparison.same_batches(candidate) and comparison.are_paired(look)
        equal = gain_of(runs, rungs[1.0], paired)
        facts |= {"seeds": len(runs), "paired": paired, "equal_steps": {"gain": equal.value, "half": equal.half(level)}}
        for price, cost in comparison.costs(candidate).items():
            judged = judgements[price]
            facts["prices"][price] = {
                "cost": cost,
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
        files = differing_files(variant.home, self.base.home)
        code = {"words": variant.code or "work tree", "hash": variant.home.name, "differs_in": files}
        settings = variant.changed(variant.settings)
        return {"code": code, "identity": variant.identity, "settings": settings, "parameters": variant.parameters}

    # -- in words ------------------------------------------------------------------------------------------------

    def table(self):
        return as_table(HEADER, [self.row(candidate) for candidate in self.candidates])

    def row(self, candidate):
        facts = self.facts(candidate)
        cells = [candidate.name, "", "", "", facts["verdict"], str(facts["seeds"])]
        if facts["equal_steps"]:
            cells[1] = signed(facts["equal_steps"])
            cells[2] = self.cost(candidate)
            several = len(facts["prices"]) > 1
            texts = [signed(one) + f" by {price}" * several for price, one in facts["prices"].items()]
            cells[3] = "; ".join(texts)
            each = {one["verdict"] for one in facts["prices"].values()}
            if len(each) > 1:
                cells[4] = "; ".join(f"{one['verdict']} by {price}" for price, one in facts["prices"].items())
        return cells

    def cost(self, candidate):
        comparison, cost = self.comparison, f"{candidate.flops / self.base.flops:.2f}"
        if not comparison.timing.is_known([candidate, self.base]):
            return cost
        ratio, spread = comparison.timing.ratio(candidate, self.base)
        steps = candidate.settings["max_iters"] / self.base.settings["max_iters"]
        return f"{cost}, {ratio * steps:.2f} ± {ratio * steps * spread:.2f}"

    def sentences(self, candidate):
        """Yield what was found of a candidate, in words."""
        facts = self.facts(candidate)
        if facts["why"]:
            yield f"{candidate.name}: {facts['verdict']}: {facts['why']}"
        elif not facts["prices"]:
            yield f"{candidate.name} is undecided: its first runs are missing"
        for price, one in facts["prices"].items():
            by = f"by {price}" + f" ({one['cost']:.2f} times the baseline's)," 
            gain = signed(one) if one["verdict"] != FAILS else signed(one | {"gain": -one["gain"]}).lstrip("+")
            yield MEANS[one["verdict"]].format(name=candidate.name, base=self.base.name, by=by, gain=gain)
        if facts["verdict"] == UNDECIDED and facts["prices"]:
            yield self.what_next(candidate, facts)

    def what_next(self, candidate, facts):
        """Return what it would take to decide about a candidate."""
        comparison, seeds = self.comparison, facts["seeds"]
        later = [look for look in comparison.looks if look > seeds]
        more = later[0] if later else 2 * seeds
        runs = [comparison.run_at(one, 0.0, 0, 1.0) for one in (candidate, self.base)]
        left = clock((more - seeds) * sum(map(comparison.timing.run_seconds, runs)))
        least = min(one["detectable"] for one in facts["prices"].values()) * (seeds / more) ** 0.5
        how = "rerun the command" if later else f"--seeds={','.join(map(str, [*comparison.looks, more]))}"
        return f"{more - seeds} more seeds ({left}) would find {least:.3f}: {how}"

    def where(self):
        """Return where a verdict holds."""
        base, settings = self.base, self.base.settings
        tokens = base.tokens_per_step * settings["max_iters"] / base.parameters
        size = f"{settings['n_layer']} layers, width {settings['n_embd']}, {tokens:.2g} tokens per parameter"
        return f"This holds at {size}, on {settings['dataset']}."

    def notes(self):
        """Return the caveats of the table, one per line."""
        comparison, lines = self.comparison, []
        missing = comparison.missing()
        if missing:
            lines.append(f"{len(missing)} runs are missing, at least")
        if not comparison.is_searching():
            lines.append("no learning rates are tried: a rate unsuited to a length makes the baseline worse there")
        for candidate in self.found:
            files = [file for file in differing_files(candidate.home, self.base.home) if file.startswith(("train", "data"))]
            if files:
                lines.append(f"{candidate.name} has its own {', '.join(files)}: its batches and its steps may differ")
            times = candidate.parameters / self.base.parameters
            if abs(times - 1) > 0.2:
                also = "compare it with a wider or narrower baseline (--n_embd) too"
                lines.append(f"{candidate.name} has {times:.2f} times the baseline's parameters: {also}")
        if len(self.candidates) > 4:
            lines.append("of many candidates that gain nothing, 2 to 3% seem to pay: confirm with --first_seed=101")
        return lines

    def markdown(self, details=False):
        parts = [self.table()]
        if details:
            parts.append(as_table(DETAILS, self.details()))
        sentences = [f"{sentence}." for one in self.candidates for sentence in self.sentences(one)]
        parts.append(" ".join([*sentences, self.where()]))
        parts.append("\n".join(f"NOTE {line}" for line in self.notes()))
        return "\n\n".join(part for part in parts if part) + "\n"

    def details(self):
        """Return a row for each variant and each length of the baseline."""
        groups = {}
        for run, result in self.comparison.results.items():
            if result["loss"] is not None and run.seed >= self.comparison.options["first_seed"]:
                groups.setdefault((run.variant, run.steps), []).append((run, result["loss"]))
        rows = []
        for (variant, steps), found in sorted(groups.items(), key=lambda item: (item[0][0].name, item[0][1])):
            losses = [loss for _, loss in found]
            sd = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
            cells = [variant.name, f"{variant.parameters:,}", f"{found[0][0].rate:g}", f"{steps:,}"]
            rows.append([*cells, f"{statistics.fmean(losses):.4f}", sd])
        return rows

    def lines(self):
        """Return a line for each candidate, of a fixed form, for programs."""
        lines = []
        for candidate in self.candidates:
            facts = self.facts(candidate)
            worst = min(facts["prices"].values(), key=lambda one: one["gain"], default=None)
            gain = f"{worst['gain']:+.4f} ± {worst['half']:.4f}" if worst else "none"
            lines.append(f"VERDICT {facts['verdict']} | {candidate.name} | gain {gain} | seeds {facts['seeds']}")
        return lines

    # -- files ---------------------------------------------------------------------------------------------------

    def json(self, command, seconds):
        comparison, settings, rungs = self.comparison, self.base.settings, self.comparison.rungs(0)
        noise = statistics.stdev(rungs[1.0].values()) if 1.0 in rungs else None
        return {
            "schema": SCHEMA,
            "command": command,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(seconds),
            "machine": machine_name(comparison.device),
            "commit": code_version()["commit"],
            "data": {"dataset": settings["dataset"], "sha256": comparison.meta["sha256"]},
            "where": self.where(),
            "level": comparison.level,
            "baseline": {"name": self.base.name, "noise": noise} | self.identity(self.base),
            "candidates": [self.facts(candidate) for candidate in self.candidates],
        }

    def csv(self):
        """Return all runs, a line each."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = ["rate", "seed", "steps", "loss", "logged", "flops", "seconds", "machine", "refused"]
        writer.writerow(["variant", "code", "folder", *names])
        for run, result in self.comparison.results.items():
            place = [run.variant.name, run.variant.home.name, run.folder.name]
            writer.writerow([*place, *(result[name] for name in names)])
        return text.getvalue()

    @file_errors()
    def write(self, command, seconds):
        folder, facts = self.comparison.options["out"], self.json(command, seconds)
        contents = {"table.md": f"    {command}\n\n{self.markdown(details=True)}", "runs.csv": self.csv()}
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


def as_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
