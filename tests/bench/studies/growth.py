"""Does a gain grow or fade with training? 3 layers of width 128, at 400, 1,600 and 6,400 steps.

The text is that of studies/depth.md, prepared as data/gcide.
"""

CANDIDATES = [
    "standard: --residual=standard",
    "W2: --attention=w2",
    "cosine: --attention=cosine",
    "dense: --connection=dense",
    "Method 3.1, input kept: --residual=m3.1 --keep_input",
    "x0: --connection=x0",
    "value residual: --value_residual",
]
SETTINGS = ["--dataset=gcide", "--eval_tokens=524288", "--dtype=bfloat16", "--compile=true", "--ladder=none"]
RATES = {400: "3.5e-3,7e-3,1.4e-2", 1600: "2.5e-3,5e-3,1e-2", 6400: "2.5e-3,5e-3,1e-2"}  # to begin with
COMPARISONS = {
    f"{steps:,} steps": [
        *CANDIDATES,
        *SETTINGS,
        f"--max_iters={steps}",
        f"--warmup_iters={steps // 10}",
        f"--rates={rates}",
        "--seeds=1,2,3,4,5",
    ]
    for steps, rates in RATES.items()
}

# The standard model's losses at 6,400 steps vary: more seeds for it and for the only variant that gains.
COMPARISONS["6,400 steps, ten seeds"] = [
    "standard: --residual=standard --learning_rate=8.6e-3",
    "cosine: --attention=cosine --learning_rate=5.6e-3",
    *SETTINGS,
    "--max_iters=6400",
    "--warmup_iters=640",
    "--rates=none",
    "--seeds=1,2,3,4,5,6,7,8,9,10",
]
