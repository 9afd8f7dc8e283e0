"""Method 3.1: x' = 1/m Σ_{i≤l} mlp_i(x + attn_i(x)), Method 1 divided by the number of layers m = l + 1."""

residual = "m3.1"
