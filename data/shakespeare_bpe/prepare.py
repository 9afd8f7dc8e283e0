"""Tiny Shakespeare in byte-pair tokens: python data/shakespeare_bpe/prepare.py [--tokenizer=gpt2]

Uses input.txt in this folder if there is one, else copies Tiny Shakespeare from data/shakespeare_char if it is there,
else downloads it. The tokens are learned from the text, so that no vocabulary has to be downloaded, except with
--tokenizer=gpt2.
"""

tokenizer = "bpe"  # bpe, gpt2 or run:FOLDER
vocab_size = 0  # number of bpe tokens to learn; 0: 1024

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import configure
from data.prepare import new_folder, prepare
from data.shakespeare_char.prepare import tiny_shakespeare

if __name__ == "__main__":
    configure(globals())
    folder = new_folder("shakespeare_bpe", __file__)
    text, source = tiny_shakespeare(folder)
    prepare(folder, text, source, tokenizer, vocab_size)
