"""A size for one GPU, nanoGPT's for Tiny Shakespeare: 6 layers, width 384. Combine it with any method's file."""

n_layer = 6
n_head = 6
n_embd = 384
tie_weights = True
block_size = 256
dropout = 0.3

batch_size = 64
max_iters = 5000
learning_rate = 1e-3
eval_interval = 250
compile = True
