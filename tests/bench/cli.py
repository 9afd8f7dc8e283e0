"""The command line of programs that take more than settings."""

import argparse

from config.runtime.common import UserError


class ArgumentParser(argparse.ArgumentParser):
    """Parse as argparse does, with one-line errors and no abbreviations."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        raise UserError(message)
