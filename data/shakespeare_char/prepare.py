"""Tiny Shakespeare, character by character: python data/shakespeare_char/prepare.py

Uses input.txt in this folder if there is one, else copies Tiny Shakespeare from data/shakespeare_bpe if it is there,
else downloads it: one megabyte of plays.
"""

import sys
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import configure
from config.runtime.program import atomic_write, command, file_errors, print0, read_text, sha256
from data.prepare import new_folder, prepare

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@file_errors()
def tiny_shakespeare(folder) -> tuple[str, str]:
    """Return the text and its source: `folder`/input.txt, else English text that ships with Python.

    If there is no input.txt, Tiny Shakespeare is first copied there from the folder next door, or downloaded. The text
    of Python needs no network, so everything runs everywhere. Its source says that it is another text.
    """
    path = Path(folder) / "input.txt"
    if not path.exists():
        try:
            content = text_next_door(path.parent) or download(SHAKESPEARE_URL)
        except (OSError, ValueError, HTTPException) as error:  # no network, or a proxy with a wrong name or answer
            return fallback_text(path, f"could not be downloaded ({error})")
        if sha256(content) != SHAKESPEARE_SHA256:
            return fallback_text(path, "was damaged in the download")
        with atomic_write(path) as file:
            file.write(content)
    text = read_text(path)
    genuine = sha256(text.encode()) == SHAKESPEARE_SHA256
    return text, "Tiny Shakespeare" if genuine else f"your own {path.parent.name}/input.txt"


def text_next_door(folder) -> bytes:
    """Return Tiny Shakespeare from the folder next to `folder` that has it, or nothing."""
    for path in folder.parent.glob("shakespeare_*/input.txt"):
        with suppress(OSError):  # a file that cannot be read is no reason not to download one
            if sha256(text := path.read_bytes()) == SHAKESPEARE_SHA256:
                return text
    return b""


def download(url) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read()


def fallback_text(path, why) -> tuple[str, str]:
    from pydoc_data.topics import topics  # nothing is written, so the next prepare.py tries to download again

    source = "NOT Tiny Shakespeare but text from Python's built-in help (pydoc_data.topics)"
    print0(f"NOTE    Tiny Shakespeare {why}: THE TEXT IS {source}")
    cure = f"put its text at {path}, or, with a network, run {command(f'data/{path.parent.name}/prepare.py')}"
    print0(f"NOTE    LOSSES ARE NOT COMPARABLE with Tiny Shakespeare's: for those, {cure}")
    return "\n".join(topics[name] for name in sorted(topics)), source


if __name__ == "__main__":
    configure(globals())  # there are no settings: whatever is given is an error
    folder = new_folder("shakespeare_char", __file__)
    text, source = tiny_shakespeare(folder)
    prepare(folder, text, source)
