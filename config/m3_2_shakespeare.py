"""Method 3.2: x' = Σ_{i≤l} w_i mlp_i(x + attn_i(x)), Method 1 with learned weights w = softmax(mix)."""

residual = "m3.2"
