"""Programs of tests in processes that have PyTorch imported already, which takes a tenth of the time.

They are forks of a process that has done nothing but import it: a fork of one that has trained may not train.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch._dynamo"])  # optimizers import the second


def run_program(command, out, err):
    for path, fd in (out, 1), (err, 2):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), fd)
    sys.argv = command[1:]
    sys.path.insert(0, str(Path(command[1]).parent))
    try:
        runpy.run_path(command[1], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None


class Forked:
    """Runs a Python program, as subprocess.Popen does. What it prints goes to files that have names."""

    def __init__(self, command, stdout, stderr, **_):
        self.process = FORKS.Process(target=run_program, args=(command, stdout.name, stderr.name))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.returncode

    def wait(self):
        self.process.join()
        return self.returncode


def run_forked(command, **_):
    with tempfile.NamedTemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as err:
        code = Forked(command, out, err).wait()
        return SimpleNamespace(returncode=code, stderr=err.read())
