"""Tiny Shakespeare in byte-pair tokens: python data/shakespeare_bpe/prepare.py [--tokenizer=gpt2]

Uses input.txt in this folder if there is one, else downloads it. The tokens are learned from the text, so that no
vocabulary has to be downloaded, unless GPT-2's are asked for.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config.runtime.common import ArgumentParser, install_excepthook
from data import prepare, tiny_shakespeare

if __name__ == "__main__":
    install_excepthook()
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default="bpe", help="bpe, gpt2, hf:NAME or run:FOLDER (default: bpe)")
    parser.add_argument("--vocab_size", type=int, help="tokens to learn for bpe (default: 1024)")
    options = parser.parse_args()
    folder = Path(__file__).resolve().parent
    text, source = tiny_shakespeare(folder)
    prepare(folder, text, source, options.tokenizer, options.vocab_size)
