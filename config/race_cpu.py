"""A race to nanoGPT's result on a laptop: Muon brings validation loss 1.92 in a tenth of the time."""

dataset = "shakespeare_char"
block_size = 64

batch_size = 16
max_iters = 200
optimizer = "muon"
learning_rate = 2e-2
warmup_iters = 10
