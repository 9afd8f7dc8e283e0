"""Method 2: h = Σ_{i≤l} attn_i(x), the attention outputs of all layers up to this one on this layer's x."""

residual = "m2"
