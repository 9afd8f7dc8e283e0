"""Method 5.3: softmax(Σ_{i≤l} QK_iᵀ / (√d_k m)), the mean of the scores of the m = l + 1 layers up to this one."""

attention = "summed_qk"
qk_scale = "5.3"
