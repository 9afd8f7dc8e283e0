"""Tiny Shakespeare, one megabyte of plays, character by character: python data/shakespeare_char/prepare.py"""

import sys
import urllib.request
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import atomic_write, configure, print0, read_text
from data.prepare import prepare, sha256, split_end

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def tiny_shakespeare(script):
    """Return folder, texts and source for prepare(). A missing input.txt is copied or downloaded."""
    path = Path(script).resolve().with_name("input.txt")
    try:
        if not path.exists():
            near = {sha256(text): text for text in map(Path.read_bytes, path.parents[1].glob("*/input.txt"))}
            content = near.get(SHA256) or urllib.request.urlopen(URL, timeout=10).read()
            if sha256(content) != SHA256:
                raise ValueError("it is another text")
            with atomic_write(path) as file:
                file.write(content)
    except Exception as error:  # a network and its proxies fail in many ways
        source = "NOT Tiny Shakespeare but text from Python's built-in help (pydoc_data.topics)"
        print0(f"NOTE    THE TEXT IS {source}: no download ({error}). Save {URL} as {path}, then run {script}")
        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        text = read_text(path)
        source = "Tiny Shakespeare" if sha256(text.encode()) == SHA256 else f"your own {path.parent.name}/input.txt"
    return path.parent, *split_end([text], 0.1), source


if __name__ == "__main__":
    configure(__file__)
    prepare(*tiny_shakespeare(__file__))
