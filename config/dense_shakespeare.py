"""DenseFormer: layer l reads Σ_{i≤l} w_li x_i, a learned mix of the embedding and all earlier outputs."""

connection = "dense"
