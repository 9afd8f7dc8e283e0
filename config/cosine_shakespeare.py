"""QK-norm: softmax(s_h cos(q, k)) V, with a learned scale s_h per head, √d_k at first."""

attention = "cosine"
