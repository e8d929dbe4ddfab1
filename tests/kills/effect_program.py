"""The program of the kill suite: ``effect_program.py ROOT NAME ACTION``, run by Exec and File keys.

It has one effect, the file ROOT/values/NAME, and records in ROOT/effects when it begins and when
it ends: whole lines, durable. It holds a lock while it works, and records a clash where another
process holds it: a key has at most one program at a time.
"""

# Without pathlib, whose import takes longer than the rest of this program.
# ruff: noqa: PTH104, PTH123

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time

ROOT, NAME, ACTION = sys.argv[1:4]
VALUE = f"{ROOT}/values/{NAME}"
WANT = os.environ.get("WANT", "-")
OPERATION = os.environ.get("RECONCILED_OPERATION", "-")
ATTEMPT = os.environ.get("RECONCILED_ATTEMPT", "0")
STEPS = ("one", "two", "three")


def record(what: str) -> None:
    """Append one line to the record."""
    file = os.open(f"{ROOT}/effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    line = f"{what} {NAME} {ACTION} {OPERATION} {ATTEMPT} {WANT} {os.getpid()}\n"
    os.write(file, line.encode())
    os.fsync(file)
    os.close(file)
    sync(ROOT)


def sync(directory: str) -> None:
    """Make the names in *directory* durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(handle)
    os.close(handle)


def value() -> str:
    """The present value; empty if there is none."""
    try:
        with open(VALUE) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def take_effect(text: str) -> None:
    """Replace the value, durably."""
    new = f"{VALUE}.{os.getpid()}"
    with open(new, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(new, VALUE)
    sync(f"{ROOT}/values")


def work() -> int:
    """The work of apply, rollback and after."""
    time.sleep(0.02)  # so that a kill may come during the work; nothing depends on it
    if ACTION == "rollback":
        take_effect("rolled back")
    elif ACTION == "steps":
        reached = os.environ.get("RECONCILED_STEP", "")
        done = STEPS.index(reached) + 1 if reached in STEPS else 0
        for step in STEPS[done:]:
            record(f"step:{step}")
            if subprocess.run(["reconciled", "step", step], check=False).returncode:
                return 1
        take_effect(WANT)
    elif ACTION == "after":
        with open(f"{ROOT}/page.txt") as page:
            take_effect(page.read())
    else:
        take_effect(WANT)
    return 0


def main() -> int:
    """Run ACTION; the exit code of the program."""
    if ACTION == "check":
        return 0 if value() == WANT else 1
    if ACTION == "recover":
        if value() == WANT:
            return 0
        # Begun and not ended: a power cut. The result is unknown, so a person has to decide.
        with open(f"{ROOT}/effects", "a+") as effects:
            effects.seek(0)
            began = f"begin {NAME} apply {OPERATION} " in effects.read()
        return 12 if began else 10
    lock = os.open(f"{ROOT}/locks/{NAME}", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        record("clash")
        return 1
    record("begin")
    code = work()
    record("end")
    return code


if __name__ == "__main__":
    sys.exit(main())
