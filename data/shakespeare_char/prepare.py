"""Tiny Shakespeare, character by character: python data/shakespeare_char/prepare.py

Uses input.txt in this folder if there is one, else downloads it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import start_program
from data.prepare import new_folder, prepare
from data.shakespeare import tiny_shakespeare

if __name__ == "__main__":
    start_program(__file__)  # there are no settings: whatever is given is an error
    folder = new_folder("shakespeare_char", __file__)
    text, source = tiny_shakespeare(folder)
    prepare(folder, text, source)
