"""W2-RoPE: scores are -(|μ_q - μ_k|² + |σ_q - σ_k|²) / τ, with RoPE on the means μ and d equal numbers in each σ."""

attention = "w2"
