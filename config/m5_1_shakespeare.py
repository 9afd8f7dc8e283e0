"""Method 5.1: softmax(Σ_{i≤l} Q_i K_iᵀ / √d_k), the scores of all layers up to this one."""

attention = "summed_qk"
qk_scale = "5.1"
