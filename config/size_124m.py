"""The size of GPT-2 small: 124 million parameters with its vocabulary, about half a million tokens per step."""

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
tie_weights = True

batch_size = 16
gradient_accumulation_steps = 30  # 16 * 30 * 1024 = 491,520 tokens; 32 on 4 or 8 GPUs
max_iters = 20000
learning_rate = 6e-4
warmup_iters = 700
beta2 = 0.95
eval_interval = 1000
compile = True
