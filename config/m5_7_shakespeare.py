"""Method 5.7: softmax(Σ_{i≤l} Q_i K_iᵀ / a_i), with a_i > 0 learned for each l and i, initially √d_k."""

attention = "summed_qk"
qk_scale = "5.7"
