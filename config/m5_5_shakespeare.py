"""Method 5.5: softmax(Σ_{i≤l} Q_i K_iᵀ / (a_i √d_k)), with a_i > 0 learned for each l and i."""

attention = "summed_qk"
qk_scale = "5.5"
