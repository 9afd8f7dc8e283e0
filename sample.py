"""
Write text with a trained model: `python sample.py` takes the newest run.

Every setting below can be given as --name=value, and --help lists them. Only the checkpoint is
needed; the data folder may be gone.
"""

import math
import sys
from pathlib import Path

import torch

from config import read_settings
from config.runtime.checkpoint import build_model, find_checkpoint, load_checkpoint, newest_run
from config.runtime.checks import check_range
from config.runtime.common import UserError, install_excepthook, pick_device, quiet_pipe, read_text
from config.runtime.maps import draw_maps
from data.huggingface import describe_export, save_pretrained
from data.tokenizer import first_tokens, tokenizer_from_state

install_excepthook()  # users' mistakes end in one line and exit code 2

# -----------------------------------------------------------------------------
out_dir = ""  # folder of the run; empty: the newest one in out/
checkpoint = "best"  # best: lowest validation loss, latest: last saved
start = ""  # text to continue; FILE:path: from a file; -: from standard input; empty: a new line
num_samples = 3  # texts to write
max_new_tokens = 500  # tokens in each
temperature = 0.8  # 1.0: as the model learned, lower: safer, 0: always the likeliest token
top_k = 0  # draw from the k likeliest tokens only; 0: from all
top_p = 1.0  # draw from the fewest tokens whose probabilities sum to p
seed = 1337  # same seed, same text
device = "auto"  # auto, cpu, cuda, cuda:1, mps
export = ""  # a new folder for model and tokenizer, which transformers reads; then nothing is sampled
maps = ""  # a new picture of the attention weights over `start`, such as maps.png; then nothing is sampled
settings = read_settings(__file__)
globals().update(settings)
# -----------------------------------------------------------------------------

check_range(settings, "num_samples max_new_tokens", 1)
check_range(settings, "temperature top_k seed", 0)
if not 0 < top_p <= 1:
    raise UserError(f"top_p = {top_p} does not work: it must be in (0, 1]")
if checkpoint not in ("best", "latest"):
    raise UserError(f"checkpoint = {checkpoint!r} does not work: it must be best or latest")
if export and maps:
    raise UserError("export and maps do not work together: give one of them")
device = pick_device(device)

# the model and its tokenizer
folder = Path(out_dir) if out_dir else newest_run()
path = find_checkpoint(folder, prefer=checkpoint)
saved = load_checkpoint(path)
model = build_model(saved).to(device).eval()
tokenizer = tokenizer_from_state(saved["tokenizer"])

if export:
    save_pretrained(model, export, tokenizer)
    print(describe_export(model, export, tokenizer))
    raise SystemExit(0)

# what to continue
if start == "-":
    start = sys.stdin.read()
elif start.startswith("FILE:"):
    start = read_text(start.removeprefix("FILE:"))
tokens = tokenizer.encode(start) or first_tokens(tokenizer)
idx = torch.tensor([tokens], device=device)

if maps:
    draw_maps(model, tokens, tokenizer, maps)
    print(f"{maps}: attention weights of {path}, a row for each layer, a column for each head")
    raise SystemExit(0)

quiet_pipe()
val_loss = f"validation loss {saved['val_loss']:.4f}" if math.isfinite(saved["val_loss"]) else "not evaluated yet"
print(f"{path}: step {saved['iter_num']}, {val_loss}, {saved['data']['source']}")
generator = torch.Generator(device).manual_seed(seed)
for _ in range(num_samples):
    print("-" * 80)
    print(start, end="")
    stream = model.stream(idx, max_new_tokens, temperature, top_k or None, top_p, generator)
    for text in tokenizer.decode_stream((token.item() for token in stream), tokens):
        print(text, end="", flush=True)
    print()
