"""
The three micro settings of the W2 document: python tests/bench/micro.py [--quick]

The copy task of recall.py with 2 layers and a context of 128 (base) or 512 (long), or 4 layers (deep): the loss after
a hundred steps at one learning rate, and the time and peak memory of a training step, W2 and standard in turns. With
the published widths, where W2 is the narrower one, and with equal widths.
"""

import recall
from stats import compare
from tasks import W2_KINDS, experiment, mean_sd, table
from measure import cost_of_steps

SETTINGS = {  # layers, tokens of a sequence, sequences
    "base": (2, 128, 32),
    "long": (2, 512, 4),
    "deep": (4, 128, 32),
}


def trial(run, device):
    return recall.trial(run, device) if run["task"] == "copy" else cost_of_steps(run, device)


def main(sweep):
    steps, seeds, budget = (5, [1, 2], 0) if sweep.quick else (100, [1, 2, 3], 10)
    standard, diagonal = (model for model, _ in recall.PUBLISHED.values())
    settings, vocab_size = SETTINGS, 1024
    if sweep.quick:
        settings, vocab_size = {"base": (1, 16, 4), "deep": (2, 16, 4)}, 64
    widths = {
        "published widths": {"standard": standard, "W2, diagonal σ": diagonal},
        "equal widths": {"standard": standard} | {name: standard | kind for name, kind in W2_KINDS.items()},
    }
    rows = []
    for setting, (n_layer, T, batch_size) in settings.items():
        for which, models in widths.items():
            size = {"block_size": T - 1, "vocab_size": vocab_size, "n_layer": n_layer}
            models = {name: size | model for name, model in models.items()}
            run = {"batch_size": batch_size, "steps": steps, "learning_rate": 1e-3}
            copy = run | {"task": "copy", "setting": setting, "recipe": "published"}
            results = sweep.repeated({name: copy | {"model": model} for name, model in models.items()}, seeds)
            costs = {"task": "cost", "setting": f"{setting}, {which}", "models": list(models.values())}
            costs |= {"batch_size": batch_size, "budget": budget}
            (costs,) = sweep.run([costs])  # with nothing beside it, which would slow it
            compared = compare(results)
            for i, (name, group) in enumerate(results.items()):
                rows.append(
                    [
                        f"{setting}, {which}" if i == 0 else "",
                        name,
                        f"{group[0]['parameters']:,}",
                        mean_sd(group),
                        compared[name],
                        f"{1e3 * costs['seconds'][i]:.0f} ms",
                        f"{costs['ratios'][i]:.2f}",
                        f"{costs['bytes'][i] / 1e6:.0f} MB",
                    ]
                )
    header = ["setting", "", "parameters", "loss", "difference", "step", "/ standard", "memory"]
    table(f"Loss after {steps} steps at a learning rate of 1e-3, and what a step costs", header, rows)


if __name__ == "__main__":
    experiment("micro", trial, main, __doc__)
