"""W2-RoPE: attention scores are -(|μ_q - μ_k|² + |σ_q - σ_k|²) / τ, the means μ with RoPE."""

attention = "w2"
