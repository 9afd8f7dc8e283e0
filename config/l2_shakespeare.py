"""L2 attention: attention scores are -|q - k|² / τ, queries and keys with RoPE. W2 without σ."""

attention = "w2"
sigma = "none"
