#!/usr/bin/env python3
"""Run a command while every core of this machine is busy: ``python tests/stress.py COMMAND…``.

One process a core computes without end. They end with the command, and also where this program
is killed; the exit code is the command's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def compute() -> None:
    """Keep a core busy until the parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    while os.getppid() == PARENT:  # it may have ended before the call above
        for _ in range(1_000_000):
            pass


PARENT = os.getpid()
busy = []
try:
    for _ in os.sched_getaffinity(0):
        pid = os.fork()
        if pid == 0:
            try:
                compute()
            finally:
                os._exit(1)
        busy.append(pid)
    sys.exit(subprocess.run(sys.argv[1:], check=False).returncode)
finally:
    for pid in busy:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
