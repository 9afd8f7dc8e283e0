"""
How often compare.py is wrong: simulated comparisons of a candidate that gains nothing, by compare.py's own code.

    python tests/bench/simulate.py [comparisons of each case]

The baseline's loss is a power law of its cost with a floor, and the candidate's is the same at its own cost. So
*pays* is always false, and the true gain at equal cost is 0.
"""

import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

import compare
import plan
from report import Report

CURVES = {
    "8 layers of width 256": lambda cost: 1.520 + 0.344 * cost**-0.68,  # fitted to the ladder in studies/depth.md
    "slow": lambda cost: 1.5 + 0.4 * cost**-0.3,
}


def made_up(baseline, rng, curve, noise, of_candidate=1.0, of_seed=0.0, effect=0.0):
    """Return a function from a run to its result: a curve's loss and noise, of the run and of its seed."""
    offsets = rng.normal(0, of_seed, 100)

    @cache
    def result(run):
        own = run.candidate is not baseline
        flops = run.candidate.flops_per_token * run.candidate.tokens_per_step * run.steps
        loss = curve(flops / baseline.flops) + offsets[run.seed] - effect * own
        loss += rng.normal(0, noise * of_candidate if own else noise)
        return {"loss": loss, "flops": flops, "steps": run.steps, "seed": run.seed, "rate": run.rate}

    return result


def comparison_of(cost, seeds=3, *options):
    """Return a comparison of a baseline and a candidate of `cost` times its operations."""
    words = ["base:", "candidate: --dropout=0.1", f"--seeds={','.join(map(str, range(1, seeds + 1)))}", "--rates=none"]
    settings, words, common = compare.read_arguments([*words, "--max_iters=2000", *options])
    data = SimpleNamespace(meta={"vocab_size": 65, "sha256": "of no data"})
    patches = {"ensure_prepared": lambda name: name, "load_dataset": lambda name: data}
    patches |= {"identify": lambda candidates, *_: candidates, "code_version": lambda: {"sha256": "of no code"}}
    with mock.patch.multiple(plan, **patches):
        made = plan.Comparison("", words, common, settings | {"out": Path("nowhere")}, compare.pick_device("cpu"))
    base, candidate = made.candidates
    made.candidates[1] = replace(candidate, flops_per_token=cost * base.flops_per_token)
    return made


def reports(comparison, count, rng, **settings):
    """Yield the reports of `count` simulated comparisons."""
    for _ in range(count):
        comparison.last_result = made_up(comparison.baseline, rng, **settings)
        yield Report(comparison)


def simulate(comparison, count, rng, **settings):
    """Return (the shares of all verdicts, the shares of intervals that cover the truth at equal cost and steps)."""
    verdicts, covered = Counter(), {"equal cost": [], "equal steps": []}
    for report in reports(comparison, count, rng, **settings):
        fit = report.fits["candidate"]
        verdicts[report.verdict("candidate")] += 1
        gain, _, half, _ = fit.gain({1.0: 1})
        truth = settings["curve"](1) - settings["curve"](fit.cost) + settings.get("effect", 0)
        covered["equal steps"].append(abs(gain - truth) < half)
        if fit.is_measured(fit.cost):
            gain, _, half, _ = fit.gain(fit.reference(fit.cost))
            covered["equal cost"].append(abs(gain - settings.get("effect", 0)) < half)
    shares = {verdict: number / count for verdict, number in verdicts.items()}
    return shares, {name: np.mean(values) for name, values in covered.items() if values}


def pays(shares):
    return sum(share for verdict, share in shares.items() if "pays" in verdict)


def main(count):
    print("| curve | candidate's noise | seeds | × operations | *pays* | covered at equal cost | at equal steps |")
    print("|---|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for curve, of_candidate, seeds, cost in product(CURVES, (0.5, 1, 2, 3), (3, 5, 9), (1.24, 1.41, 2.83)):
        settings = {"curve": CURVES[curve], "noise": 0.005, "of_candidate": of_candidate}
        shares, covered = simulate(comparison_of(cost, seeds), count, rng, **settings)
        cells = [curve, of_candidate, seeds, cost, f"{pays(shares):.1%}", *(f"{part:.1%}" for part in covered.values())]
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
