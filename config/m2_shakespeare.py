"""Method 2: h = Σ_{i≤l} attn_i(x), the attention outputs of all layers so far on this layer's x."""

residual = "m2"
