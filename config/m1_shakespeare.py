"""Method 1: x' = Σ_{i≤l} mlp_i(x + attn_i(x)), the MLP outputs of all layers up to this one on this layer's x."""

residual = "m1"
