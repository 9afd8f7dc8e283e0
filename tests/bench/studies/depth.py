"""Does a residual method pay at depth? 2, 4 and 8 layers of width 64, and 8 of width 256, which takes a GPU.

The text is that of depth.md, prepared as data/text.
"""

# learning rates: chosen by runs of half the steps, of seed 0, among halves and doubles until the best had a worse one
# on either side
COMPARISONS = {
    "8 layers of width 64": [
        "standard: --learning_rate=0.016",
        "Method 1: --residual=m1 --learning_rate=0.004",
        "Method 1, input kept: --residual=m1 --keep_input --learning_rate=0.008",
        "Method 2, input kept: --residual=m2 --keep_input --learning_rate=0.016",
        "Method 3.1, input kept: --residual=m3.1 --keep_input --learning_rate=0.008",
        "W2, scalar σ: --attention=w2 --learning_rate=0.016",
        "Method 5.2: --attention=summed_qk --qk_scale=5.2 --learning_rate=0.016",
        "standard, wider: --n_embd=136 --learning_rate=0.004",
        "--n_layer=8",
    ],
    "8 layers of width 256": [
        "standard: --learning_rate=0.004",
        "Method 1: --residual=m1 --learning_rate=0.002",
        "Method 1, input kept: --residual=m1 --keep_input --learning_rate=0.004",
        "Method 2, input kept: --residual=m2 --keep_input --learning_rate=0.004",
        "Method 3.1, input kept: --residual=m3.1 --keep_input --learning_rate=0.004",
        "W2, scalar σ: --attention=w2 --learning_rate=0.004",
        "Method 5.2: --attention=summed_qk --qk_scale=5.2 --learning_rate=0.004",
        "--n_layer=8",
    ],
    "4 layers of width 64": [
        "standard: --learning_rate=0.016",
        "Method 1: --residual=m1 --learning_rate=0.016",
        "Method 1, input kept: --residual=m1 --keep_input --learning_rate=0.032",
        "Method 2, input kept: --residual=m2 --keep_input --learning_rate=0.008",
        "--n_layer=4",
    ],
    "2 layers of width 64": [
        "standard: --learning_rate=0.016",
        "Method 1: --residual=m1 --learning_rate=0.032",
        "Method 1, input kept: --residual=m1 --keep_input --learning_rate=0.032",
        "Method 2, input kept: --residual=m2 --keep_input --learning_rate=0.032",
        "--n_layer=2",
    ],
}
NARROW = ["--n_embd=64", "--n_head=2", "--max_iters=2000", "--warmup_iters=200"]
WIDE = ["--n_embd=256", "--n_head=4", "--block_size=256", "--batch_size=64", "--max_iters=1000", "--warmup_iters=100"]
for title, arguments in COMPARISONS.items():
    arguments += WIDE if title.endswith("256") else NARROW
    arguments += ["--dataset=text", "--eval_tokens=524288", "--rates=none", "--ladder=0.5,2,4", "--ladder_seeds=1,2"]
