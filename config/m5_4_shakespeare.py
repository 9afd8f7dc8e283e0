"""Method 5.4: softmax(Σ_{i≤l} Q_i K_iᵀ / (d_k^a m^b)), m = l + 1, with a and b learned per layer."""

attention = "summed_qk"
qk_scale = "5.4"
