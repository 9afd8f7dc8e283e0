"""Reach the validation loss of nanoGPT's CPU quick start in an eighth of the time (bfloat16), with Muon."""

block_size = 64

batch_size = 16
max_iters = 250
optimizer = "muon"
learning_rate = 2e-2
warmup_iters = 10
eval_interval = 250  # only at the end: an evaluation takes as long as 30 steps
