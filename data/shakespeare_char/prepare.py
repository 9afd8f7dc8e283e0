"""Tiny Shakespeare, character by character: python data/shakespeare_char/prepare.py

Uses input.txt in this folder if there is one, else downloads it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config.runtime.common import ArgumentParser, install_excepthook
from data import prepare, tiny_shakespeare

if __name__ == "__main__":
    install_excepthook()
    ArgumentParser(description=__doc__).parse_args()
    folder = Path(__file__).resolve().parent
    text, source = tiny_shakespeare(folder)
    prepare(folder, text, source, tokenizer="char")
