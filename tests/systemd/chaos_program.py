"""A program for an Exec, which records in a ledger when it begins, takes a step, and ends.

``chaos_program.py KEY VERSION SECONDS [critical] [steps]``, in a guest. Each line is durable
before it continues. A key may have one program at a time: each holds a lock while it runs.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

STEPS = ("1", "2", "3")


def main() -> int:
    """Begin, work, and apply the manifest: ``keys/KEY`` holds VERSION, or is removed."""
    key, version, seconds, *more = sys.argv[1:]
    state = Path(os.environ["STATE_DIRECTORY"])
    ledger = os.open(state / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    action, step = os.environ["RECONCILED_ACTION"], os.environ.get("RECONCILED_STEP", "")

    def note(what: str) -> None:
        operation = os.environ["RECONCILED_OPERATION"]
        words = (what, key, operation, os.environ["RECONCILED_ATTEMPT"], step or "0", os.getpid())
        os.write(ledger, (" ".join(map(str, words)) + f" {time.monotonic()} {version}\n").encode())
        os.fsync(ledger)

    def asked_to_end(number: int, _: FrameType | None) -> None:
        note("asked-to-end")
        if "critical" not in more:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    alone = os.open(state / f"lock-of-{key}", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note("beside-another")
    signal.signal(signal.SIGTERM, asked_to_end)
    note("begin")
    todo = [each for each in STEPS if each > step] if "steps" in more else ["0"]
    for each in todo:
        until = time.monotonic() + float(seconds) / len(todo)
        while (left := until - time.monotonic()) > 0:
            time.sleep(left)  # the work
        if each != "0":
            done = subprocess.run(["reconciled", "step", each], check=False)
            if done.returncode:
                note(f"step-refused-{done.returncode}")
                return 1
            step = each
            note("stepped")
    made = state / "keys" / key
    made.parent.mkdir(exist_ok=True)
    if action == "remove":
        made.unlink(missing_ok=True)
    else:
        made.with_suffix(".new").write_text(version)
        made.with_suffix(".new").replace(made)
    note("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
