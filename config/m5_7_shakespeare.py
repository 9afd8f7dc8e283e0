"""Method 5.7: softmax(Σ_{i≤l} Q_i K_iᵀ / a_i), a_i > 0 learned per layer and layer summed, √d_k at first."""

attention = "summed_qk"
qk_scale = "5.7"
