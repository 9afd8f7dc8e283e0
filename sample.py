"""
Write text with a trained model: `python sample.py` uses the newest run.

Every setting below can be given as --name=value, and --help lists them. Only the checkpoint is needed, not the data.
"""

out_dir = ""  # folder of the run; empty: the newest one in out/
checkpoint = "best"  # best: the one with the lowest validation loss; latest: the last one saved
start = ""  # prompt; FILE:path reads it from a file (- is standard input); empty: a new document, or a new line
num_samples = 3  # number of samples
max_new_tokens = 500  # tokens per sample, which is cut where the next document would begin
temperature = 0.8  # below 1 favors likely tokens; 0: always the likeliest
top_k = 0  # sample from the k likeliest tokens only; 0: from all
seed = 1337  # the same seed and num_samples give the same text
device = "auto"  # auto, cpu, cuda, cuda:1, mps

from config import UserError, check_min, configure, read_text

globals().update(configure(__file__).values)  # --help ends here, before PyTorch is imported

import signal
from itertools import takewhile

import torch

from config.runtime import load_checkpoint, newest_run, pick_device
from data.tokenizer import first_tokens, tokenizer_from_state
from model import GPT, GPTConfig

check_min(globals(), "num_samples max_new_tokens", 1)
check_min(globals(), "temperature top_k seed", 0)
if checkpoint not in ("best", "latest"):
    raise UserError(f"checkpoint = {checkpoint!r} is invalid: it must be best or latest")
ptdevice = pick_device(device)

# the model and its tokenizer
saved = load_checkpoint(out_dir or newest_run(), best=checkpoint == "best")
model = GPT(GPTConfig(**saved["config"]))
model.load_state_dict(saved["model"])
model.to(ptdevice).eval()
tokenizer = tokenizer_from_state(saved["tokenizer"])
if hasattr(signal, "SIGPIPE"):  # let `| head` end the program silently
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)

# the prompt: without one, what begins a document, if the run's text has such a token
if start.startswith("FILE:"):
    start = read_text(start.removeprefix("FILE:"))
next_document = tokenizer.document_start if saved["data"]["documents"]["train"] > 1 else []
tokens = tokenizer.encode(start) or next_document or first_tokens(tokenizer)

loss = f"validation loss {saved['best_val_loss']:.4f}, " if saved["path"].endswith("best.pt") else ""
print(f"{saved['path']}: step {saved['iter_num']}, {loss}{saved['data']['source']}")
idx = torch.tensor([tokens] * num_samples, device=ptdevice)
generator = torch.Generator(ptdevice).manual_seed(seed)
stop = next_document[0] if next_document else None  # there is no more to show once each sample has it
samples = model.generate(idx, max_new_tokens, temperature, top_k, generator, tokenizer.vocab_size, stop)
for sample in samples[:, len(tokens) :].tolist():
    print("-" * 80)
    print(start + tokenizer.decode(list(takewhile(lambda token: token not in next_document, sample))))
