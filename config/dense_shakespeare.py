"""DenseFormer: layer l reads Σ_{i≤l} w_li x_i, a learned mix of the embedding and all outputs so far."""

connection = "dense"
