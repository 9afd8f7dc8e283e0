"""Tiny Shakespeare in byte-pair tokens: python data/shakespeare_bpe/prepare.py [--tokenizer=gpt2]"""

tokenizer = "bpe"  # bpe, learned from the text; gpt2; run:FOLDER
vocab_size = 1024  # number of bpe tokens to learn

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import configure
from data.prepare import prepare
from data.shakespeare_char.prepare import tiny_shakespeare

globals().update(configure(__file__).values)
prepare(*tiny_shakespeare(__file__), tokenizer, vocab_size)
