"""Method 5.1: softmax(Σ_{i≤l} QK_iᵀ / √d_k), the scores of all layers up to this one."""

attention = "summed_qk"
qk_scale = "5.1"
