"""What is compared: variants, read from arguments such as "NAME: @HEAD config/m1_shakespeare.py --keep_input"."""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config import split_settings
from config.runtime.errors import UserError
from frozen import freeze, split_code

OURS = ("out_dir", "init_from", "overwrite", "eval_only", "seed")  # settings that a comparison makes itself


@dataclass(frozen=True, eq=False)
class Variant:
    """Settings of train.py, and the code that they are settings of."""

    name: str
    settings: dict  # all of them
    defaults: dict
    home: Path  # its frozen code
    code: str = ""  # the words that name it
    parameters: int = 0
    flops_per_token: float = 0.0
    identity: str = ""  # of what a few steps compute; names that in its runs' folders
    refused: str = ""  # why it cannot take part
    crashed: str = ""  # what its code failed with

    @property
    def tokens_per_step(self):
        return math.prod(self.settings[name] for name in ("batch_size", "grad_accum_steps", "block_size"))

    @property
    def flops(self):
        return self.flops_per_token * self.tokens_per_step * self.settings["max_iters"]

    def changed(self, settings):
        """Return those of its `settings` that differ from its train.py's defaults."""
        return {name: value for name, value in settings.items() if value != self.defaults[name]}


def read_variants(words, common, against, folder):
    """Return the variants of the arguments, each with its code frozen in `folder`, and the baseline first."""
    named = [split_name(one) for one in words]
    if against:
        named = named or [split_name("")]
        rest = named[0][2]
        named.insert(0, (against, [f"@{against}"], rest))
    if len(named) < 2:
        needed = "config/standard_shakespeare.py config/m1_shakespeare.py, or --against=HEAD and a candidate"
        raise UserError(f"a baseline and a candidate are needed: {needed}")
    names = [name for name, _, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two variants are named {name!r}: rename one of them, as in 'NAME: words'")
    variants = []
    for name, code, rest in named:
        home = freeze(code, folder)
        defaults, settings = read_settings_of(name, rest, common, home)
        variants.append(Variant(name, settings, defaults, home, " ".join(code)))
    for name in ("dataset", "block_size", "eval_tokens"):
        values = sorted({str(variant.settings[name]) for variant in variants})
        if len(values) > 1:
            why = "losses are comparable only on the same windows of the same text"
            raise UserError(f"{name} differs ({' and '.join(values)}): {why}")
    return variants


def read_words(words, common):
    """Return the name and the settings of an argument: those of the working tree's code."""
    name, _, rest = split_name(words)
    return name, read_settings_of(name, rest, common, ROOT)[1]


def split_name(words):
    """Return the name of an argument, which may be given as "NAME: ...", the words for its code, and the others."""
    name, colon, rest = f"{words} ".partition(": ")
    try:
        arguments = shlex.split(rest if colon else words)
    except ValueError as error:  # a quotation that does not end
        raise UserError(f"{words}: {error}") from None
    if not colon:
        short = [word.lstrip("-") if word.startswith(("-", "@")) else Path(word).stem for word in arguments]
        name = ", ".join(short) or "defaults"
    return " ".join(name.split()), *split_code(arguments)


def read_settings_of(name, arguments, common, home):
    """Return the defaults of the train.py in `home`, and a variant's settings.

    Config files come first, then the `common` options, then its own.
    """
    files = [word for word in arguments if not word.startswith("-")]
    files = [str(home / word) if (home / word).is_file() else word for word in files]  # as that code has it
    options = [word for word in arguments if word.startswith("-")]
    given = {}
    for part in (files, common, options):
        defaults, some = split_settings(home / "train.py", part)
        given |= some
    taken = [setting for setting in OURS if setting in given]
    if taken:
        raise UserError(f"{name}: {taken[0]} is set by the comparison: leave it out")
    return defaults, defaults | given
