"""Method 5.3: softmax(Σ_{i≤l} Q_i K_iᵀ / (√d_k m)), the mean of the scores of all m = l + 1 layers."""

attention = "summed_qk"
qk_scale = "5.3"
