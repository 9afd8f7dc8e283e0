"""Tiny Shakespeare, character by character: python data/shakespeare_char/prepare.py

Uses input.txt in this folder if there is one, else downloads it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import read_settings
from config.runtime.processes import install_excepthook
from data.prepare import new_folder, prepare
from data.shakespeare import tiny_shakespeare

if __name__ == "__main__":
    install_excepthook()
    read_settings(__file__)  # there are none: whatever is given is an error
    folder = new_folder("shakespeare_char", __file__)
    text, source = tiny_shakespeare(folder)
    prepare(folder, text, source)
