"""Attention residuals: layer l reads a mix of what each earlier layer has added, by softmax over the layers."""

connection = "attnres"
