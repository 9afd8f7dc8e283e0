"""A race to nanoGPT's validation loss on a CPU: its quick start, with Muon, in about an eighth of the time."""

block_size = 64

batch_size = 16
max_iters = 250
optimizer = "muon"
learning_rate = 2e-2
warmup_iters = 10
