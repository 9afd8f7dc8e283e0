"""x0 lambdas: layer l reads a_l x_l + b_l x_0, the output before it and the embedding, a and b learned."""

connection = "x0"
