"""
Write text with a trained model: `python sample.py` uses the newest run.

Every setting below can be given as --name=value, and --help lists them. Only the checkpoint is needed, not the data.
"""

out_dir = ""  # folder of the run; empty: the newest one in out/
checkpoint = "best"  # best: the one with the lowest validation loss; latest: the last one saved
start = ""  # prompt; FILE:path reads it from a file (- is standard input); empty: a newline
num_samples = 3  # number of samples
max_new_tokens = 500  # tokens per sample, which is cut where the next document would begin
temperature = 0.8  # below 1 favors likely tokens; 0: always the likeliest
top_k = 0  # sample from the k likeliest tokens only; 0: from all
seed = 1337  # the same seed and num_samples give the same text
device = "auto"  # auto, cpu, cuda, cuda:1, mps

from config import check_range, configure

configure(globals())  # by config files and --name=value; --help ends here, before PyTorch is imported

import math
from itertools import takewhile
from pathlib import Path

import torch

from config.runtime import checkpoints
from config.runtime.devices import pick_device
from config.runtime.program import UserError, one_line, quiet_pipe, read_text
from data.tokenizer import first_tokens, tokenizer_from_state

check_range(globals(), "num_samples max_new_tokens", 1)
check_range(globals(), "temperature top_k seed", 0)
if checkpoint not in ("best", "latest"):
    raise UserError(f"checkpoint = {checkpoint!r} is invalid: it must be best or latest")
ptdevice = pick_device(device)

# the model and its tokenizer
folder = Path(out_dir) if out_dir else checkpoints.newest_run()
saved = checkpoints.load(checkpoints.find(folder, prefer=checkpoint))
model = checkpoints.build_model(saved).to(ptdevice).eval()
tokenizer = tokenizer_from_state(saved["tokenizer"])
quiet_pipe()
for note in checkpoints.code_notes(saved, checkpoints.code_version(), ["model.py"]):
    print(one_line(f"NOTE    {note}"))

# the prompt
if start.startswith("FILE:"):
    start = read_text(start.removeprefix("FILE:"))
tokens = tokenizer.encode(start) or first_tokens(tokenizer)

val_loss = f"last validation loss {saved['val_loss']:.4f}" if saved["val_loss"] < math.inf else "not evaluated yet"
about = f"step {saved['iter_num']}, {val_loss}, {saved['data']['source']}"
print(one_line(f"{saved['path']}: {about}"))
idx = torch.tensor([tokens] * num_samples, device=ptdevice)
generator = torch.Generator(ptdevice).manual_seed(seed)
samples = model.generate(idx, max_new_tokens, temperature, top_k, generator, tokenizer.vocab_size)
next_document = tokenizer.document_start[:1]  # the token that begins one, if the tokenizer has such a token
decoded = len(tokenizer.decode(tokens))
for sample in samples[:, len(tokens) :].tolist():
    document = takewhile(lambda token: token not in next_document, sample)
    print("-" * 80)
    # decoded together with the prompt: the text of a token may depend on the token before it
    print(start + tokenizer.decode([*tokens, *document])[decoded:])
