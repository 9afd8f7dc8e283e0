"""Method 5.5: softmax(Σ_{i≤l} Q_i K_iᵀ / (a_i √d_k)), a_i > 0 learned per layer and layer summed."""

attention = "summed_qk"
qk_scale = "5.5"
