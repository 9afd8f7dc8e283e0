"""
How often compare.py is wrong: python tests/simulate.py [comparisons per case]

Its own code decides about simulated runs. The baseline's loss follows a curve of its cost, and the candidate's is that,
less its true gain. So with a gain of 0, *pays* and *does not pay* are both wrong.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/bench")]

from config import read_settings
from plan import Comparison
from stats import FAILS, PAYS, UNDECIDED
from variants import Variant

SETTINGS = read_settings(ROOT / "train.py", [])
KINDS = {  # of noise
    "a power law with a floor": {},
    "noise grows with length": {"growth": 0.5},
    "candidate's noise halved": {"of_candidate": 0.5},
    "doubled": {"of_candidate": 2.0},
    "tripled": {"of_candidate": 3.0},
    "seed effect 0.02, noise 0.005": {"of_seed": 0.02, "noise": 0.005},
    "a sudden drop, at a time that differs by seed": {"drop": 0.1},
    "the first row, by ten commands with 3, 4, ... 12 seeds": {"commands": [[n] for n in range(3, 13)]},
}


@dataclass
class Truth:
    cost: float = 1.0  # of the candidate, in runs of the baseline
    gain: float = 0.0  # of the candidate, over the baseline at equal cost
    noise: float = 0.01  # of the baseline at its own length
    of_candidate: float = 1.0  # the candidate's noise, in units of the baseline's
    growth: float = 0.0  # noise grows as cost to this power
    of_seed: float = 0.0  # deviation of what runs of one seed share
    drop: float = 0.0  # by how much the loss drops abruptly, at a cost that differs by variant and seed
    commands: tuple = ((3, 5, 8),)  # --seeds of one command after another, until one decides

    def loss(self, cost, late=None):
        late = 1 / (1 + (cost / 1.5) ** 6) if late is None else late  # the share of seeds whose loss has not dropped
        return 1.520 + 0.344 * cost**-0.68 + self.drop * late  # as measured at 3 layers


class Simulated(Comparison):
    """A comparison of a baseline and a candidate whose runs end at once."""

    def __init__(self, truth, rng, rates=""):
        self.truth, self.rng = truth, rng
        self.of_seed, self.dropped = rng.normal(0, truth.of_seed, 100), 1.5 * (1 / rng.random((2, 100)) - 1) ** (1 / 6)
        base = Variant("base", SETTINGS, SETTINGS, ROOT, flops_per_step=1e6)
        candidate = replace(base, home=Path("candidate"), flops_per_step=1e6 * truth.cost)
        super().__init__([base, candidate], {"rates": rates, "first_seed": 1, "seeds": "3"}, ROOT, ROOT, {}, {})

    def result(self, run):
        truth, own = self.truth, run.variant is not self.baseline
        cost = run.steps / SETTINGS["max_iters"] * (truth.cost if own else 1)
        if run not in self.results:
            noise = self.rng.normal(0, truth.noise * cost**truth.growth * (truth.of_candidate if own else 1))
            loss = truth.loss(cost, cost < self.dropped[int(own), run.seed]) - truth.gain * own
            loss += noise + self.of_seed[run.seed] + 0.1 * np.log2(run.rate / 0.005) ** 2
            self.results[run] = {"loss": loss, "refused": "", "seconds": None}
        return self.results[run]

    def outcome(self):
        """Return the verdict, whether the interval covers the truth, and the number of runs."""
        for looks in self.truth.commands:
            self.looks = looks
            self.decide()
            ((candidate, found),) = self.standing.items()
            self.earlier = {candidate.identity: self.others(candidate) | {(1, n) for n in looks}}
            if found.verdict != UNDECIDED:
                break
        truth = self.truth.loss(found.baseline_at) - self.truth.loss(self.truth.cost) + self.truth.gain
        return found.verdict, abs(found.equal_cost.value - truth) <= found.equal_cost.half, len(self.results)


def simulate(truth, count, rng, rates=""):
    """Return the shares of *pays*, of *does not pay* and of intervals that cover the truth, and the mean of runs."""
    verdicts, *others = zip(*(Simulated(truth, rng, rates).outcome() for _ in range(count)))
    return verdicts.count(PAYS) / count, verdicts.count(FAILS) / count, *map(np.mean, others)


def main(count):
    print("| losses | cost | false *pays* | false *does not pay* | coverage | 0.02 found |\n|---|---|---|---|---|---|")
    rng, costs = np.random.default_rng(0), (0.4, 1.0, 1.2, 1.86, 3.9)
    for name, kind, cost in ((*item, cost) for item in KINDS.items() for cost in costs):
        *shares, _ = simulate(Truth(cost=cost, **kind), count, rng)
        shares.append(simulate(Truth(cost=cost, gain=0.02, **kind), count, rng)[0])
        print("|", " | ".join([name, str(cost), *(f"{share:.1%}" for share in shares)]), "|", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
