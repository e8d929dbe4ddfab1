"""Output and checks of the demo: claims are checked, real output is indented, waits end."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("reconciled"))
PATIENCE = 15.0  # seconds for anything that takes one or two
POLL_INTERVAL = 0.02


class ClaimFailed(Exception):
    """Something that the demo claims did not happen; str() says what."""


def say(text: str = "") -> None:
    """Print one line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def quote(text: str) -> None:
    """Print real output, indented."""
    say(textwrap.indent(text.rstrip("\n"), "    "))


def wait_for(what: str, answer: Callable[[], Any]) -> Any:
    """Poll *answer* until it is true, and return it. Raises ClaimFailed after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not (found := answer()):
        if time.monotonic() > deadline:
            raise ClaimFailed(f"{what}: it did not happen within {PATIENCE:.0f} s")
        time.sleep(POLL_INTERVAL)
    return found


def expect(what: str, *, holds: bool) -> None:
    """Raise ClaimFailed unless *what* holds."""
    if not holds:
        raise ClaimFailed(f"{what}: false")


def content(path: Path) -> str:
    """The text of a file; empty if it does not exist."""
    return path.read_text() if path.exists() else ""


class Daemon:
    """A running ``reconciled run``, and its log."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "daemon.log"
        self._searched = 0  # characters of the log
        arguments = [COMMAND, "--config", str(directory / "reconciled.yaml"), "run"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stderr=log)  # noqa: S603 - the program that this is about

    def line(self, event: str, key: str = "") -> None:
        """Wait for the next line of the log with *event* (of *key*), and show it."""
        self.lines((event, key))

    def lines(self, *wanted: tuple[str, str]) -> None:
        """Wait for the next line of each event and key, and show them as they came."""
        found = sorted((self._wait(event, key) for event, key in wanted), key=re.Match.start)
        self._searched = found[-1].end()
        for each in found:
            quote(each[1])

    def _wait(self, event: str, key: str) -> re.Match[str]:
        name = f"{event} of {key}" if key else event
        pattern = rf"^\S+T(\S+ +\w+ +{re.escape(event)} .*{re.escape(key)}\b.*)$"

        def search() -> re.Match[str] | None:
            if self.process.poll() not in (None, 0):
                raise ClaimFailed(
                    f"{name}: the daemon ended before, with {self.process.returncode}"
                )
            return re.compile(pattern, re.MULTILINE).search(content(self.log), self._searched)

        found: re.Match[str] = wait_for(name, search)
        return found

    def end(self) -> None:
        """Stop it if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Scene:
    """One part of the demo, with one daemon in its own directory."""

    def __init__(self, directory: Path, parts: Iterator[int]) -> None:
        self.directory = directory
        self.daemon: Daemon | None = None
        self._parts = parts

    def title(self, text: str) -> None:
        """Begin the next part."""
        say(f"\n{next(self._parts)}. {text}\n")

    def start(self) -> Daemon:
        """Start a daemon in the background."""
        say("  $ reconciled --config reconciled.yaml run &")
        self.daemon = Daemon(self.directory)
        return self.daemon

    def show(self, *names: str) -> None:
        """Print files as cat would."""
        for name in names:
            say(f"  $ cat {name}")
            quote(content(self.directory / name))

    def grep(self, pattern: str, name: str) -> None:
        """Print the lines of a file that match. Raises ClaimFailed if none does."""
        lines = content(self.directory / name).splitlines()
        found = [line for line in lines if re.search(pattern, line)]
        expect(f"{name} has {pattern}", holds=bool(found))
        say(f"  $ grep -E '{pattern}' {name}")
        quote("\n".join(found))

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a verb that must exit with *code*, and print its output."""
        shown = (f'"{each}"' if " " in each else each for each in arguments)
        say(f"  $ reconciled --config reconciled.yaml {' '.join(shown)}")
        ended = subprocess.run(  # noqa: S603 - the program that this is about
            [COMMAND, "--config", str(self.directory / "reconciled.yaml"), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        quote(ended.stdout + ended.stderr)
        expect(f"its exit code is {code}, not {ended.returncode}", holds=ended.returncode == code)
        return ended.stdout
