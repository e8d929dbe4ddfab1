"""Starting one program: its environment and descriptors, and why a start failed.

1. The environment is the daemon's without the variables meant for the daemon alone.
2. Standard input is a file in memory and output goes to a file. A pipe would block the program,
   or break when the daemon dies.
3. When memory runs out, the kernel ends a program before the daemon, whatever the daemon's score.
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

from reconciled.programs.children import ProgramHandle, unblocked_signals
from reconciled.programs.output import Output
from reconciled.programs.supervision import (
    Supervision,
    encode_launch_request,
    start_supervised,
)

_NOT_INHERITED = ("NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY")
_NOT_INHERITED_PREFIXES = ("WATCHDOG_", "LISTEN_")


@attrs.frozen
class Launch:
    """A program to start."""

    arguments: tuple[str, ...]
    directory: Path | None
    environment: Mapping[str, str]
    stdin: bytes

    def start(self, output: Output, supervision: Supervision, parents: set[int]) -> ProgramHandle:
        """Start it under a small parent, whose pid is added to *parents*.

        Blocks, for some syncs too if it belongs to an operation: call it in a thread.
        """

        def run_parent(command: Sequence[str], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
            return self._popen(command, output, fds)

        request = encode_launch_request(
            supervision, self.arguments, self.environment, self.directory
        )
        return start_supervised(supervision, request, run_parent, parents)

    def _popen(
        self,
        command: Sequence[str],
        output: Output,
        descriptors: tuple[int, ...],
    ) -> subprocess.Popen[bytes]:
        with _memory_file(self.stdin) as source, output.writer() as writer, unblocked_signals():
            return subprocess.Popen(  # noqa: S603 a list of arguments, no shell
                command,
                stdin=source,
                stdout=writer,
                stderr=writer,
                env=_inherited_environment(),
                start_new_session=True,
                pass_fds=descriptors,
            )


def program_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """The daemon's environment without the variables meant for it alone, plus *additions*.

    PATH ends with the directory of ``reconciled``, so that a program can call ``reconciled step``.
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
    # With ``python -m`` argument 0 is a source file; the script is installed beside the
    # interpreter.
    executable = sys.argv[0] if Path(sys.argv[0]).name == "reconciled" else sys.executable
    return str(Path(executable).absolute().parent)


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
    """One line: which program could not be started, why, and what to change."""
    program = launch.arguments[0]
    where = launch.directory or Path.cwd()
    if isinstance(error, ValueError):  # a NUL, a lone surrogate
        why = str(error)
    elif not where.is_dir():
        why = f"its working directory {where} does not exist"
    elif error.errno == errno.ENOENT and "/" not in program:
        why = "it was not found in PATH"
    elif error.errno == errno.ENOENT and (where / program).exists():
        why = "the interpreter in its #! line does not exist"
    elif error.errno == errno.ENOENT:
        why = f"{where / program} does not exist"
    elif error.errno == errno.EACCES:
        why = (
            f"permission denied for {where / program}: make it executable (chmod +x), also for"
            " the daemon's user"
        )
    elif error.errno == errno.ENOEXEC:
        why = "it has no executable format: begin a script with a line like #!/bin/sh"
    else:
        why = error.strerror or str(error)
    return f"cannot start {program}: {why}"
