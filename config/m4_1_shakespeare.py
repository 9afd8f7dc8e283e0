"""Method 4.1: h = 1/m Σ_{i≤l} attn_i(x), Method 2 divided by the number of layers m = l + 1."""

residual = "m4.1"
