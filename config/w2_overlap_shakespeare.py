"""W2 attention by the overlap of Gaussians: the score that the W2 document's code computes."""

attention = "w2"
w2_score = "overlap"
