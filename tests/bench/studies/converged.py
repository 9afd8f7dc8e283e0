"""Does a method pay where more steps help no more? A text so short that the baseline learns it by heart.

It is the first 100,000 characters of Tiny Shakespeare, a half of them to train on:

    head -c 100000 data/shakespeare_char/input.txt > plays.txt
    python data/text/prepare.py plays.txt --name=plays --val_fraction=0.5
"""

RUN = ["--n_layer=8", "--n_embd=64", "--n_head=2", "--dropout=0.1", "--dataset=plays", "--compile=false"]
RUN += ["--max_iters=600", "--warmup_iters=60", "--eval_interval=50", "--eval_tokens=50000", "--best"]
RUN += ["--rates=none", "--seeds=1,2,3", "--ladder=0.5,2"]
# learning rates: those of depth.py for 8 layers of width 64
COMPARISONS = {
    "8 layers of width 64, 50,000 characters": [
        "standard: --learning_rate=0.016",
        "Method 1, input kept: --residual=m1 --keep_input --learning_rate=0.008",
        "Method 3.1, input kept: --residual=m3.1 --keep_input --learning_rate=0.008",
        "Method 1: --residual=m1 --learning_rate=0.004",
        "Method 3.2, input kept: --residual=m3.2 --keep_input --learning_rate=0.008",
        "Method 4.2, input kept: --residual=m4.2 --keep_input --learning_rate=0.008",
        "W2, scalar σ: --attention=w2 --learning_rate=0.016",
        "W2, diagonal σ: --attention=w2 --sigma=diagonal --learning_rate=0.016",
        "Method 5.1: --attention=summed_qk --qk_scale=5.1 --learning_rate=0.016",
        "Method 5.2: --attention=summed_qk --qk_scale=5.2 --learning_rate=0.016",
        "Method 5.3: --attention=summed_qk --qk_scale=5.3 --learning_rate=0.016",
        "standard, wider: --n_embd=136 --learning_rate=0.004",
        *RUN,
    ],
}
