"""The standard block, to compare with: h = x + attn(x), x' = h + mlp(h)."""

dataset = "shakespeare_char"
attention = "standard"
residual = "standard"
