"""OpenWebText in GPT-2's tokens: python data/openwebtext/prepare.py [--dataset=NAME] [--tokenizer=gpt2]

Eight million documents of the web, 54 GB of text, which `datasets` (pip install datasets) downloads and keeps; it takes
any other dataset of the hub, or a folder of one, that has a train split with a column of texts, such as
--dataset=Salesforce/wikitext:wikitext-103-raw-v1, where what follows the colon is one of the dataset's configurations.
The last one in two thousand tokens is for validation. What is interrupted goes on when the same command is given again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config.runtime.common import ArgumentParser, install_excepthook
from data.corpus import parts_of_dataset, prepare_corpus

if __name__ == "__main__":
    install_excepthook()
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="Skylion007/openwebtext", help="name on the hub or folder; :CONFIG to choose")
    parser.add_argument("--field", default="text", help="column with the text (default: text)")
    parser.add_argument("--tokenizer", default="gpt2", help="char, bpe, gpt2, hf:NAME or run:FOLDER (default: gpt2)")
    parser.add_argument("--vocab_size", type=int, help="tokens to learn for bpe (default: 1024)")
    parser.add_argument("--val_fraction", type=float, default=0.0005, help="share kept for validation (default: 0.0005)")
    parser.add_argument("--workers", type=int, help="processes at work (default: one for each core)")
    options = parser.parse_args()
    parts = parts_of_dataset(options.dataset, options.field)
    folder, how = Path(__file__).resolve().parent, (options.tokenizer, options.vocab_size, options.val_fraction)
    prepare_corpus(folder, parts, options.dataset, *how, options.workers)
