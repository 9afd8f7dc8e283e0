"""Method 5.6: softmax(Σ_{i≤l} Q_i K_iᵀ / (a_i d_k^b_i)), with a_i > 0 and b_i learned for each l and i."""

attention = "summed_qk"
qk_scale = "5.6"
