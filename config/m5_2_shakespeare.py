"""Method 5.2: softmax(Σ_{i≤l} Q_i K_iᵀ / (√d_k √m)), m = l + 1 layers up to this one."""

attention = "summed_qk"
qk_scale = "5.2"
