"""
How often compare.py is wrong, and what a verdict costs: simulated comparisons, decided by compare.py's own code.

    python tests/simulate.py [comparisons per case]

The baseline's loss follows a curve of its cost, and the candidate's is that of the same curve at its own cost, less its
true gain: with a gain of 0, *pays* and *does not pay* are both wrong.
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/bench")]

from config import read_settings
from plan import Comparison, read_looks
from stats import FAILS, PAYS, UNDECIDED
from variants import Variant

SETTINGS = read_settings(ROOT / "train.py", [])
BEST_RATE = 0.005


@dataclass
class Truth:
    """What simulated runs do. Losses are in nats, costs in runs of the baseline."""

    cost: float = 1.0  # of the candidate
    gain: float = 0.0  # of the candidate, over the baseline at equal cost
    noise: float = 0.01  # of the baseline at its own length
    of_candidate: float = 1.0  # the candidate's noise, in units of the baseline's
    growth: float = 0.0  # noise grows as cost to this power
    of_seed: float = 0.0  # deviation of what runs of one seed share
    drop: float = 0.0  # by how much the loss drops abruptly, at a cost that differs by variant and seed
    looks: tuple = ("3,5,8",)  # --seeds of one command after another, until one decides

    def mean(self, cost):
        """Return the mean loss at a cost: a power law with a floor, as measured at 3 layers, and the drop."""
        return 1.520 + 0.344 * cost**-0.68 + self.drop * late(cost)


def late(cost):
    """Return the share of seeds whose loss has not dropped at a cost: a half at 1.5."""
    return 1 / (1 + (cost / 1.5) ** 6)


class Simulated(Comparison):
    """A comparison of a baseline and a candidate whose runs end at once."""

    def __init__(self, truth, rng, rates=""):
        self.truth, self.rng = truth, rng
        self.of_seed, self.places = rng.normal(0, truth.of_seed, 100), rng.random((2, 100))
        base = Variant("base", SETTINGS, SETTINGS, ROOT, flops_per_step=1e6)
        candidate = replace(base, home=Path("candidate"), flops_per_step=1e6 * truth.cost)
        options = {"rates": rates, "first_seed": 1, "seeds": truth.looks[0]}
        super().__init__([base, candidate], options, ROOT, ROOT, {}, {})

    def result(self, run):
        return self.results.get(run)

    def do(self, run):
        truth, own = self.truth, run.variant is not self.baseline
        cost = run.steps / SETTINGS["max_iters"] * (truth.cost if own else 1)
        noise = self.rng.normal(0, truth.noise * cost**truth.growth * (truth.of_candidate if own else 1))
        above = truth.drop * ((self.places[int(own), run.seed] < late(cost)) - late(cost))
        loss = truth.mean(cost) + above + noise + self.of_seed[run.seed] - truth.gain * own
        loss += 0.1 * math.log2(run.rate / BEST_RATE) ** 2
        self.results[run] = {"loss": loss, "refused": "", "cost": cost, "seconds": None}

    def outcome(self):
        """Return (the verdict, whether the interval covers the truth, the cost of all runs)."""
        candidate = self.candidates[0]
        for seeds in self.truth.looks:
            self.looks = read_looks({"seeds": seeds})
            while runs := self.missing():
                for run in runs:
                    self.do(run)
            judged, level = self.standing[candidate].judged, self.level(candidate)
            self.earlier = {candidate.identity: self.others(candidate) | {(1, n) for n in self.looks}}
            if judged.verdict != UNDECIDED:
                break
        truth = self.truth.mean(judged.rung) - self.truth.mean(self.truth.cost) + self.truth.gain
        covered = abs(judged.gain.value - truth) <= judged.gain.half(level)
        return judged.verdict, covered, sum(result["cost"] for result in self.results.values())


def simulate(truth, count, rng, rates=""):
    """Return the shares of the verdicts, of intervals that cover the truth, and the mean cost of a comparison."""
    verdicts, covered, costs = zip(*(Simulated(truth, rng, rates).outcome() for _ in range(count)))
    return {verdict: n / count for verdict, n in Counter(verdicts).items()}, np.mean(covered), np.mean(costs)


CASES = {  # kinds of noise
    "a curve with a floor": {},
    "noise grows with length": {"growth": 0.5},
    "the candidate's noise is half": {"of_candidate": 0.5},
    "twice": {"of_candidate": 2.0},
    "three times": {"of_candidate": 3.0},
    "seeds matter": {"of_seed": 0.02, "noise": 0.005},
    "an abrupt drop, late for some seeds": {"drop": 0.1},
    "looks at 3, 4, ... 12 seeds": {"looks": tuple(map(str, range(3, 13)))},
}


def main(count):
    header = "losses", "cost", "false *pays*", "false *does not pay*", "covered", "0.02: *pays*", "runs"
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for number, ((name, kind), cost) in enumerate(product(CASES.items(), (0.4, 1.0, 1.2, 1.86, 3.9))):
        rng = np.random.default_rng(number)
        nothing, covered, _ = simulate(Truth(cost=cost, **kind), count, rng)
        gains, _, runs = simulate(Truth(cost=cost, gain=0.02, **kind), count, rng)
        shares = nothing.get(PAYS, 0), nothing.get(FAILS, 0), covered, gains.get(PAYS, 0)
        print("|", " | ".join([name, str(cost), *(f"{share:.1%}" for share in shares), f"{runs:.0f}"]), "|", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
