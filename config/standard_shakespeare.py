"""The standard block, to compare with: h = x + attn(x), x' = h + mlp(h)."""

attention = "standard"
residual = "standard"
