"""Attention residuals: layer l reads a mix of what each layer so far has added, by softmax over the layers."""

connection = "attnres"
