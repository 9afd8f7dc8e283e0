"""Method 4.2: h = Σ_{i≤l} w_i attn_i(x), Method 2 with learned weights w = softmax(mix)."""

residual = "m4.2"
