"""How low does each variant's loss get on a short text, at any length of training?

The text is the first 100,000 characters of Tiny Shakespeare, half of them for training:

    python data/shakespeare_char/prepare.py
    head -c 100000 data/shakespeare_char/input.txt > plays.txt
    python data/text/prepare.py plays.txt --name=plays --val_fraction=0.5
"""

CHEAP = {  # their learning rates at 600 steps with dropout 0.1
    "standard: --residual=standard": 0.012,
    "W2: --attention=w2": 0.014,
    "cosine: --attention=cosine": 0.019,
    "dense: --connection=dense": 0.013,
    "Method 5.1: --attention=summed_qk --qk_scale=5.1": 0.013,
}
COSTLY = {  # where the search for their learning rates begins
    "Method 1, input kept: --residual=m1 --keep_input": 0.008,
    "Method 4.2, input kept: --residual=m4.2 --keep_input": 0.008,
    "Method 3.1, input kept: --residual=m3.1 --keep_input": 0.008,
}
SETTINGS = ["--n_layer=8", "--n_embd=64", "--n_head=2", "--dataset=plays", "--compile=false", "--dtype=bfloat16"]
SETTINGS += ["--eval_interval=50", "--eval_tokens=50000", "--best", "--ladder=none", "--cost=operations"]


def trained(words, rate, steps, dropout):
    return f"{words} --learning_rate={rate} --max_iters={steps} --warmup_iters={steps // 10} --dropout={dropout}"


# The rates are searched once, then seed 0 is trained at each length with each dropout.
variants = [trained(words, 0.016, 600, 0.1) for words in CHEAP]
COMPARISONS = {"600 steps, dropout 0.1": [*variants, *SETTINGS, "--seeds=0"]}
for steps, dropout in [(300, 0.1), (450, 0.1), (900, 0.1), (300, 0.2), (450, 0.2), (600, 0.2), (900, 0.2), (1350, 0.2)]:
    variants = [trained(words, rate, steps, dropout) for words, rate in CHEAP.items()]
    COMPARISONS[f"{steps} steps, dropout {dropout}"] = [*variants, *SETTINGS, "--seeds=0", "--rates=none"]
variants = [
    trained(f"{steps} steps with dropout {dropout}:", 0.012, steps, dropout)
    for steps, dropout in [(900, 0.3), (1350, 0.1), (1350, 0.4), (2000, 0.2), (2000, 0.3)]
]
COMPARISONS["Other lengths of the standard model"] = [*variants, *SETTINGS, "--seeds=0", "--rates=none"]

# Each has another search for its rate here, and three other seeds.
variants = [trained(words, rate, 1350, 0.3) for words, rate in (CHEAP | COSTLY).items()]
COMPARISONS["1350 steps, dropout 0.3"] = [*variants, *SETTINGS, "--seeds=2,3,4"]

# Six seeds for the five with the lowest losses, at the rates found there; and for three of them, at the rates above.
found = {
    "standard: --residual=standard": 0.015,
    "W2: --attention=w2": 0.012,
    "cosine: --attention=cosine": 0.018,
    "Method 1, input kept: --residual=m1 --keep_input": 0.011,
    "Method 3.1, input kept: --residual=m3.1 --keep_input": 0.023,
}
for name, rates in [("six seeds", found), ("first rates", {words: CHEAP[words] for words in list(found)[:3]})]:
    variants = [trained(words, rate, 1350, 0.3) for words, rate in rates.items()]
    COMPARISONS[f"1350 steps, dropout 0.3, {name}"] = [*variants, *SETTINGS, "--seeds=2,3,4,5,6,7", "--rates=none"]

# The residual methods with fewer steps and another dropout.
variants = [
    trained(f"{method}, {steps} steps with dropout {dropout}: --residual={method} --keep_input", rate, steps, dropout)
    for method, rate, steps, dropout in [
        ("m1", 0.011, 900, 0.2),
        ("m3.1", 0.023, 900, 0.2),
        ("m4.2", 0.023, 900, 0.2),
        ("m4.2", 0.023, 1350, 0.4),
    ]
]
COMPARISONS["Other settings of the residual methods"] = [*variants, *SETTINGS, "--seeds=0", "--rates=none"]
