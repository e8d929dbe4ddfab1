"""A program that is about to be started: what it is given, and why it could not be.

The environment is this process's own without what is meant for it alone; standard input is a
file in memory; output goes to a file. No pipe that blocks a program, or breaks when we die.
Where memory runs out, a program is ended before this process is, whatever score that has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from reconciled.programs.children import DirectHandle, ProgramHandle, unblocked_signals
from reconciled.programs.output import Output
from reconciled.programs.small_parent import raise_oom_score
from reconciled.programs.supervision import (
    Supervision,
    encode_launch_request,
    start_supervised,
)

_NOT_INHERITED = ("NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY")
_NOT_INHERITED_PREFIXES = ("WATCHDOG_", "LISTEN_")


@attrs.frozen
class Launch:
    """What is to be started."""

    arguments: tuple[str, ...]
    directory: Path | None
    environment: Mapping[str, str]
    stdin: bytes

    def start(self, output: Output) -> ProgramHandle:
        """Start it. Blocks, for a thread: until the program is in place of its fork."""
        popen = self._popen(self.arguments, output, self.directory, self.environment)
        # Afterwards, since nothing of ours runs between fork and exec: what it starts in its
        # first instant may keep our score. Under a small parent that comes beforehand.
        raise_oom_score(b"/proc/%d/oom_score_adj" % popen.pid)
        return DirectHandle.from_popen(popen)

    def start_under_parent(
        self, output: Output, supervision: Supervision, parents: set[int]
    ) -> ProgramHandle:
        """The same under a small parent, noted at once in *parents*; blocks for some syncs."""

        def run_parent(command: Sequence[str], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
            return self._popen(command, output, None, _inherited_environment(), fds)

        request = encode_launch_request(
            supervision, self.arguments, self.environment, self.directory
        )
        return start_supervised(supervision, request, run_parent, parents)

    def _popen(
        self,
        command: Sequence[str],
        output: Output,
        directory: Path | None,
        environment: Mapping[str, str],
        descriptors: tuple[int, ...] = (),
    ) -> subprocess.Popen[bytes]:
        with _memory_file(self.stdin) as source, output.writer() as writer, unblocked_signals():
            return subprocess.Popen(  # noqa: S603 a list, and no shell: what the author wrote
                command,
                stdin=source,
                stdout=writer,
                stderr=writer,
                cwd=directory,
                env=environment,
                process_group=0,
                pass_fds=descriptors,
            )


def program_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """What a program finds: ours without what is meant for this process alone, and *additions*.

    PATH ends with the directory of ``reconciled``, so that a program can call it back.
    """
    environment = _inherited_environment()
    environment.update(additions)
    path = environment.get("PATH") or os.defpath
    environment["PATH"] = f"{path}{os.pathsep}{_executable_directory()}"
    return environment


def _inherited_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _is_daemon_only(name)}


def _is_daemon_only(name: str) -> bool:
    return name in _NOT_INHERITED or name.startswith(_NOT_INHERITED_PREFIXES)


def _executable_directory() -> str:
    # Run as a module, argument 0 is a source file; the script stands beside the interpreter.
    ours = sys.argv[0] if Path(sys.argv[0]).name == "reconciled" else sys.executable
    return str(Path(ours).absolute().parent)


@contextlib.contextmanager
def _memory_file(data: bytes) -> Iterator[int]:
    file = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def explain_start_failure(launch: Launch, error: OSError | ValueError) -> str:
    """One line for a person: what could not be started, and what would help."""
    program = launch.arguments[0]
    where = launch.directory or Path.cwd()
    if isinstance(error, ValueError):  # a NUL, a lone surrogate
        why = str(error)
    elif not where.is_dir():
        why = f"its directory {where} does not exist"
    elif error.errno == errno.ENOENT and "/" not in program:
        why = "it is not in PATH"
    elif error.errno == errno.ENOENT and (where / program).exists():
        why = "the interpreter in its first line does not exist"
    elif error.errno == errno.ENOENT:
        why = f"there is no {where / program}"
    elif error.errno == errno.EACCES:
        why = f"it is not executable (see chmod +x), or not for us: {where / program}"
    elif error.errno == errno.ENOEXEC:
        why = "it is no program; a script begins with a line like #!/bin/sh"
    else:
        why = error.strerror or str(error)
    return f"{program} cannot be started: {why}"
