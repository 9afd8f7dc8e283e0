"""W2 attention by the overlap of Gaussians: the score that the W2 document's tables measured."""

attention = "w2"
w2_score = "overlap"
