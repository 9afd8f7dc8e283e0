"""W2 attention as in W2Attn's code: how much two Gaussians overlap."""

attention = "w2_overlap"
