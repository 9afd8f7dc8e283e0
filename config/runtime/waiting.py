"""How OpenMP's threads wait for each other, which must be decided before PyTorch is imported.

They wait in a loop, which is fast on a quiet machine. Where another program needs the same cores, a looping thread
takes the core from the one it waits for, so there they sleep instead. Results do not depend on it. Nothing is chosen
if the environment has OMP_WAIT_POLICY=PASSIVE (sleep), GOMP_SPINCOUNT=300000 (loop) or OMP_NUM_THREADS.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path


def choose_waiting():
    """Let threads, of which there is one a core, sleep if some cores are not idle."""
    chosen = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & {*os.environ}  # by the user, or by torchrun
    if sys.platform != "linux" or "torch" in sys.modules or chosen:
        return
    with suppress(OSError):  # a system that hides /proc
        idle_before, total_before, cores = core_times()
        time.sleep(0.1)
        idle_after, total_after, _ = core_times()
        idle, total = idle_after - idle_before, total_after - total_before
        if cores * (total - idle) > total / 2:  # half a core, or more
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def core_times():
    """Return the clock ticks, idle and total, of the cores that this process may use, and how many cores there are."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    cores = [[int(ticks) for ticks in line[1:9]] for line in lines if line[0][3:] in map(str, os.sched_getaffinity(0))]
    return sum(ticks[3] + ticks[4] for ticks in cores), sum(map(sum, cores)), len(cores)
