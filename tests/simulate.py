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
from plan import Comparison
from stats import FAILS, PAYS
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

    def mean(self, cost):
        """Return the mean loss at a cost: a power law with a floor, as in studies/depth.md, and the drop."""
        return 1.520 + 0.344 * cost**-0.68 + self.drop * late(cost)

    def loss(self, rng, cost, of_seed, place, own):
        """Return a run's loss. `place` in [0, 1) is its seed's among all, the latest to drop first."""
        noise = rng.normal(0, self.noise * cost**self.growth * (self.of_candidate if own else 1))
        above = self.drop * ((place < late(cost)) - late(cost))
        return self.mean(cost) + above + noise + of_seed - self.gain * own


def late(cost):
    """Return the share of seeds whose loss has not dropped at a cost: a half at 1.5."""
    return 1 / (1 + (cost / 1.5) ** 6)


class Simulated(Comparison):
    """A comparison of a baseline and a candidate whose runs end at once."""

    def __init__(self, truth, rng, seeds="3,5,8", rates=""):
        self.truth, self.rng = truth, rng
        self.of_seed, self.places = rng.normal(0, truth.of_seed, 100), rng.random((2, 100))
        base = Variant("base", SETTINGS, SETTINGS, ROOT, flops_per_token=1e6, identity="base")
        candidate = replace(base, name="candidate", flops_per_token=1e6 * truth.cost, identity="candidate")
        options = {"cost": "operations", "rates": rates, "first_seed": 1, "seeds": seeds, "ladder": ""}
        super().__init__([base, candidate], options, ROOT, ROOT, {})

    def result(self, run):
        return self.results.get(run)

    def times(self, candidate):
        return None

    def do(self, run):
        own = run.variant is not self.baseline
        cost = run.steps / SETTINGS["max_iters"] * (self.truth.cost if own else 1)
        loss = self.truth.loss(self.rng, cost, self.of_seed[run.seed], self.places[int(own), run.seed], own)
        loss += 0.1 * math.log2(run.rate / BEST_RATE) ** 2
        self.results[run] = {"loss": loss, "refused": "", "cost": cost}

    def outcome(self):
        """Return (the verdict, whether the interval covers the truth, the cost of all runs)."""
        while runs := self.missing():
            for run in runs:
                self.do(run)
        (judged,) = self.standing[self.variants[1]].judgements.values()
        truth = self.truth.mean(judged.rung) - self.truth.mean(self.truth.cost) + self.truth.gain
        covered = abs(judged.gain.value - truth) <= judged.gain.half(self.level)
        return judged.verdict, covered, sum(result["cost"] for result in self.results.values())


def simulate(truth, count, rng, **options):
    """Return the shares of the verdicts, of intervals that cover the truth, and the mean cost of a comparison."""
    found = [Simulated(truth, rng, **options).outcome() for _ in range(count)]
    verdicts = Counter(verdict for verdict, _, _ in found)
    shares = {verdict: number / count for verdict, number in verdicts.items()}
    return shares, np.mean([covered for _, covered, _ in found]), np.mean([cost for _, _, cost in found])


CASES = {  # kinds of noise
    "a curve with a floor": {},
    "noise grows with length": {"growth": 0.5},
    "the candidate's noise is half": {"of_candidate": 0.5},
    "twice": {"of_candidate": 2.0},
    "three times": {"of_candidate": 3.0},
    "seeds matter": {"of_seed": 0.02, "noise": 0.005},
    "an abrupt drop, late for some seeds": {"drop": 0.1},
}


def main(count):
    rng = np.random.default_rng(0)
    header = "losses", "cost", "false *pays*", "false *does not pay*", "covered", "0.02: *pays*", "runs"
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for (name, kind), cost in product(CASES.items(), (0.4, 1.0, 1.2, 1.86, 3.9)):
        nothing, covered, _ = simulate(Truth(cost=cost, **kind), count, rng)
        gains, _, runs = simulate(Truth(cost=cost, gain=0.02, **kind), count, rng)
        shares = nothing.get(PAYS, 0), nothing.get(FAILS, 0), covered, gains.get(PAYS, 0)
        print("|", " | ".join([name, str(cost), *(f"{share:.1%}" for share in shares), f"{runs:.0f}"]), "|", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
