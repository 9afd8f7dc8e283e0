"""
All benchmarks: python tests/bench/run.py {compare,recall,entailment,micro,speed} [--quick] [...]

    compare      does it pay? any candidates on any text, or a study: methods, depth, converged
    recall       associative recall: the copy task, and MQAR; with --why, what makes W2 slow to learn it
    entailment   which node of a tree is above which
    micro        W2 and standard: loss, time and memory of three small models
    speed        what steps, tokens and compiling cost

Each takes --help. An interrupted comparison or experiment goes on where it was. Results go to out/compare (or to
out/<the study>), to out/bench and to out/speed.json.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

MODES = ("compare", "recall", "entailment", "micro", "speed")

if __name__ == "__main__":
    mode, *arguments = sys.argv[1:] or [""]
    if mode in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0)
    if mode not in MODES:
        print(f"run.py: error: {mode!r} does not work: it must be one of {', '.join(MODES)}", file=sys.stderr)
        sys.exit(2)
    if mode != "speed" and not find_spec("scipy"):
        print("run.py: error: the experiments need scipy: pip install -r tests/requirements.txt", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(subprocess.run([sys.executable, Path(__file__).with_name(f"{mode}.py"), *arguments]).returncode)
    except KeyboardInterrupt:  # which the benchmark has had too
        sys.exit(130)
