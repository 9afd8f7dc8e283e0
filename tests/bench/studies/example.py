"""The example on the front page: Method 1, W2 and QK-norm on Tiny Shakespeare."""

COMPARISONS = {
    "": [
        "config/standard_shakespeare.py",
        "config/m1_shakespeare.py",
        "config/w2_shakespeare.py",
        "config/cosine_shakespeare.py",
        "--max_iters=400",
    ]
}
