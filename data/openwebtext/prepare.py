"""OpenWebText in GPT-2's tokens: python data/openwebtext/prepare.py [--dataset=NAME] [--tokenizer=gpt2]

Eight million documents of the web, 54 GB of text, which `datasets` (pip install datasets) downloads and keeps. Any
other dataset of the hub, or a folder of one, can be taken that has a train split with a column of texts, such as
--dataset=Salesforce/wikitext:wikitext-103-raw-v1, where a configuration of the dataset follows the colon.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import read_settings
from config.runtime.common import install_excepthook
from data.corpus import read_rows
from data.prepare import prepare

# -----------------------------------------------------------------------------
dataset = "Skylion007/openwebtext"  # name on the hub, or folder; NAME:CONFIGURATION where there are several
field = "text"  # column with the text
tokenizer = "gpt2"  # char, bpe, gpt2, hf:NAME or run:FOLDER
vocab_size = 0  # of bpe: tokens to learn; 0: 1024
val_fraction = 0.0005  # share of the text kept for validation
workers = 0  # processes that encode; 0: one for each core
# -----------------------------------------------------------------------------

if __name__ == "__main__":
    install_excepthook()
    globals().update(read_settings(__file__))  # the above <- --name=value
    rows = partial(read_rows, dataset, field)
    prepare(Path(__file__).resolve().parent, rows, dataset, tokenizer, vocab_size, val_fraction, workers)
