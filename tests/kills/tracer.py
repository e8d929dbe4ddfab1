"""Kills a process at one of its system calls: ``tracer.py PID COUNT REPORT BARRIER``.

It follows the threads of PID, not its children. Each call that makes or may make something
durable is counted across all threads from 1; just before number COUNT has an effect, the process
gets SIGKILL. REPORT lists the counted calls, one a line. BARRIER is a fifo, which gets a byte
once the process is followed: the process waits for it.

Rejected: strace, which counts each thread separately, so that a number does not identify a call.
"""

# System calls by name, as the kernel has them.
# ruff: noqa: PTH115, PTH123

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
import sys
from pathlib import Path

SEIZE, INTERRUPT, LISTEN, GET_SYSCALL_INFO, SYSCALL = 0x4206, 0x4207, 0x4208, 0x420E, 24
SYSGOOD, TRACECLONE = 1, 8
EVENT_STOP = 128
WALL = 0x40000000
ENTRY = 1
AT_WORK = {
    "x86_64": {
        74: "fsync", 75: "fdatasync", 77: "ftruncate", 82: "rename", 83: "mkdir", 87: "unlink",
        258: "mkdirat", 263: "unlinkat", 264: "renameat", 316: "renameat2", 18: "pwrite64",
    },
    "aarch64": {
        82: "fsync", 83: "fdatasync", 46: "ftruncate", 34: "mkdirat", 35: "unlinkat",
        38: "renameat", 276: "renameat2", 68: "pwrite64",
    },
}.get(platform.machine(), {})  # fmt: skip
BY_DESCRIPTOR = ("fsync", "fdatasync", "ftruncate", "pwrite64")

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def ptrace(request: int, thread: int, address: int = 0, data: object = 0) -> None:
    """Raises ProcessLookupError for a thread that has ended, OSError otherwise."""
    if libc.ptrace(request, thread, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def entered(thread: int) -> tuple[int, list[int]] | None:
    """Number and arguments of the call that *thread* enters; None where it leaves one."""
    buffer = ctypes.create_string_buffer(88)
    ptrace(GET_SYSCALL_INFO, thread, len(buffer), ctypes.addressof(buffer))
    if buffer.raw[0] != ENTRY:
        return None
    number, *arguments = struct.unpack_from("<7Q", buffer.raw, 24)
    return number, arguments


def text_at(pid: int, address: int) -> str:
    """The string at *address* of the process."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(256).partition(b"\0")[0].decode(errors="replace")


def description(pid: int, name: str, arguments: list[int]) -> str:
    """The call in readable form."""
    with contextlib.suppress(OSError, OverflowError):
        if name in BY_DESCRIPTOR:
            return f"{name} {os.readlink(f'/proc/{pid}/fd/{arguments[0]}')}"
        if name in ("renameat", "renameat2"):
            where = os.readlink(f"/proc/{pid}/fd/{arguments[2]}")
            return f"{name} to {where}/{text_at(pid, arguments[3])}"
        at = name.endswith("at")
        second = arguments[1] if at or name == "rename" else arguments[0]
        return f"{name} {text_at(pid, second)}"
    return name


class Tracer:
    """Follows one process until it ends."""

    def __init__(self, pid: int, count: int, report: Path) -> None:
        self.pid = pid
        self.count = count
        self.counted = 0
        self.report = report.open("w", buffering=1)
        self.threads: set[int] = set()

    def seize(self) -> None:
        """Attach to all present threads; later ones are attached automatically."""
        for entry in Path(f"/proc/{self.pid}/task").iterdir():
            thread = int(entry.name)
            ptrace(SEIZE, thread, 0, SYSGOOD | TRACECLONE)
            self.threads.add(thread)
            ptrace(INTERRUPT, thread)

    def follow(self) -> None:
        """Follow until the last thread has ended."""
        while self.threads:
            thread, status = os.waitpid(-1, WALL)
            if not os.WIFSTOPPED(status):
                self.threads.discard(thread)
                continue
            self.threads.add(thread)
            with contextlib.suppress(ProcessLookupError):
                self.stopped(thread, os.WSTOPSIG(status), status >> 16)

    def stopped(self, thread: int, number: int, event: int) -> None:
        """Resume a stopped thread, or kill the process at its call number COUNT."""
        if number == signal.SIGTRAP | 0x80:
            call = entered(thread)
            if call is not None and call[0] in AT_WORK:
                self.counted += 1
                print(
                    self.counted, description(self.pid, AT_WORK[call[0]], call[1]), file=self.report
                )
                if self.counted == self.count:
                    os.kill(self.pid, signal.SIGKILL)
                    return
            ptrace(SYSCALL, thread)
        elif event == EVENT_STOP and number != signal.SIGTRAP:
            ptrace(LISTEN, thread)
        else:
            ptrace(SYSCALL, thread, 0, 0 if event else number)


def main() -> None:
    """Follow PID to its end."""
    pid, count, report, barrier = sys.argv[1:]
    tracer = Tracer(int(pid), int(count), Path(report))
    tracer.seize()
    # Opened for both directions, so that it does not wait; the byte is kept until it is read.
    opened = os.open(barrier, os.O_RDWR)
    os.write(opened, b"g")
    tracer.follow()


if __name__ == "__main__":
    main()
