"""Shows a real daemon at work, in a temporary directory: run it with ``make demo``.

Whatever it says has been looked at: what did not happen in time ends it with a message, the
daemon's log and exit code 1. The daemon and the directory are gone afterwards either way.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLACEHOLDER = "/tmp/reconciled-demo"  # noqa: S108 - a name in the files, replaced in their copy
COMMAND = str(Path(sys.executable).with_name("reconciled"))
PATIENCE = 15.0  # seconds for anything that takes one or two
LOOK_EVERY = 0.02
STEPS = 5  # of programs/upgrade


class NotSo(Exception):
    """Something that the demo claims did not happen."""


def say(text: str = "") -> None:
    """One line for the reader."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def quote(text: str) -> None:
    """Real output, set apart from the story."""
    say(textwrap.indent(text.rstrip("\n"), "    "))


def wait_for(what: str, answer: Callable[[], Any]) -> Any:
    """The first answer that counts as true. Raises NotSo when none comes in time."""
    deadline = time.monotonic() + PATIENCE
    while not (found := answer()):
        if time.monotonic() > deadline:
            raise NotSo(f"{what}: it did not happen within {PATIENCE:.0f} s")
        time.sleep(LOOK_EVERY)
    return found


def expect(what: str, *, holds: bool) -> None:
    """Raise NotSo unless *what* holds."""
    if not holds:
        raise NotSo(f"{what}: that is not so")


def content(path: Path) -> str:
    """What is in a file; nothing where there is none."""
    return path.read_text() if path.exists() else ""


class Daemon:
    """A running ``reconciled run``, and its log."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "daemon.log"
        self._told = 0  # characters of the log that were looked through
        arguments = [COMMAND, "--config", str(directory / "reconciled.yaml"), "run"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stderr=log)  # noqa: S603 - the program that this is about

    def line(self, event: str, key: str = "") -> None:
        """Wait for the next line of the log with *event* (of *key*), and show it."""
        name = f"{event} of {key}" if key else event
        pattern = rf"^\S+T(\S+ +\w+ +{re.escape(event)} .*{re.escape(key)}\b.*)$"

        def look() -> re.Match[str] | None:
            if self.process.poll() not in (None, 0):
                raise NotSo(f"{name}: the daemon ended before, with {self.process.returncode}")
            return re.compile(pattern, re.MULTILINE).search(content(self.log), self._told)

        found = wait_for(name, look)
        self._told = found.end()
        quote(found[1])

    def end(self) -> None:
        """Make sure that it is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Story:
    """The parts, in their order."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.site = directory / "site"
        self.daemon: Daemon | None = None
        self.part = 0

    def title(self, text: str) -> None:
        """Begin the next part."""
        self.part += 1
        say(f"\n{self.part}. {text}\n")

    def tell(self) -> None:
        """All of it. Raises NotSo."""
        self.copy()
        daemon = self.daemon = Daemon(self.directory)
        self.declared(daemon)
        self.changed(daemon)
        self.drifted()
        self.stopped(daemon)
        self.reported()
        self.planned()

    def copy(self) -> None:
        """Make the temporary directory ours: nobody else may write what decides what runs."""
        for name in ("resources", "later", "programs"):
            shutil.copytree(HERE / name, self.directory / name)
        self.site.mkdir()
        text = (HERE / "reconciled.yaml").read_text()
        configuration = self.directory / "reconciled.yaml"
        configuration.write_text(text.replace(PLACEHOLDER, str(self.directory)))
        for path in (self.directory, *self.directory.rglob("*")):
            path.chmod(path.stat().st_mode & ~0o022)

    def show(self, *names: str) -> None:
        """What a person would see with cat."""
        for name in names:
            say(f"  $ cat {name}")
            quote(content(self.directory / name))

    def declared(self, daemon: Daemon) -> None:
        """What YAML declares is made so."""
        self.title("A daemon makes true what YAML declares: one file, and one program")
        self.show("resources/greeting.yaml", "resources/release.yaml")
        say("  $ reconciled --config reconciled.yaml run &")
        daemon.line("daemon.ready")
        daemon.line("reconcile.done", "files/greeting")
        site = self.site
        wait_for("the file is there", lambda: content(site / "greeting.txt") == "Welcome.\n")
        wait_for("the program was run", lambda: content(site / "release.txt") == "1.0\n")
        self.show("site/greeting.txt", "site/release.txt")

    def changed(self, daemon: Daemon) -> None:
        """A changed manifest is acted on."""
        self.title("A manifest changes, and is acted on")
        greeting = self.directory / "resources/greeting.yaml"
        release = self.directory / "resources/release.yaml"
        greeting.write_text(content(greeting).replace("Welcome.", "Welcome to release 1.1."))
        release.write_text(content(release).replace("1.0", "1.1"))
        say("  $ sed -i 's/Welcome./Welcome to release 1.1./' resources/greeting.yaml")
        say("  $ sed -i 's/1.0/1.1/' resources/release.yaml")
        daemon.line("reconcile.done", "files/greeting")
        site, text = self.site, "Welcome to release 1.1.\n"
        wait_for("the file is changed", lambda: content(site / "greeting.txt") == text)
        wait_for("the program was run again", lambda: content(site / "release.txt") == "1.1\n")
        self.show("site/greeting.txt", "site/release.txt")

    def drifted(self) -> None:
        """What somebody else changed is put right."""
        self.title("Somebody edits the managed file; at its next look the daemon puts it right")
        path = self.site / "greeting.txt"
        wanted = content(path)
        path.write_text("Bob was here.\n")
        say("  $ echo 'Bob was here.' > site/greeting.txt")
        wait_for("the file is put right", lambda: content(path) == wanted)
        self.show("site/greeting.txt")

    def stopped(self, daemon: Daemon) -> None:
        """A stop, in the middle of a critical operation."""
        self.title("SIGTERM, while two programs run: only one of them says that it is critical")
        self.show("later/upgrade.yaml", "later/report.yaml")
        say("  $ mv later/*.yaml resources/")
        for path in (self.directory / "later").iterdir():
            path.rename(self.directory / "resources" / path.name)
        upgrade, report = self.directory / "upgrade.log", self.directory / "report.log"
        wait_for("the report has begun", lambda: content(report))
        wait_for("the upgrade is at its second step", lambda: "step 2" in content(upgrade))
        self.show("upgrade.log", "report.log")
        say(f"  $ kill -TERM {daemon.process.pid}")
        daemon.process.send_signal(signal.SIGTERM)
        expect("the upgrade was in the middle", holds="complete" not in content(upgrade))
        for event, key in (
            ("stop.began", ""),
            ("reconcile.interrupted", "programs/report"),
            ("reconcile.done", "programs/upgrade"),
            ("stop.ended", ""),
        ):
            daemon.line(event, key)
        code = daemon.process.wait(PATIENCE)
        say(f"  The daemon's exit code is {code}: a clean stop.")
        expect("the stop was clean", holds=code == 0)
        self.show("upgrade.log", "report.log")
        steps = [f"step {number} of {STEPS}" for number in range(1, STEPS + 1)]
        done = content(upgrade).splitlines() == [*steps, "complete"]
        expect("the critical upgrade was finished, once", holds=done)
        cancelled = content(report) == "began\n"
        expect("the ordinary report was cancelled", holds=cancelled)

    def reported(self) -> None:
        """The report of that stop."""
        self.title("What outlived the signal, and why the stop took as long as it did")
        self.show("state/last-stop.txt")
        report = json.loads(content(self.directory / "state/last-stop.json"))
        fates = {each["key"]: each["fate"] for each in report["stragglers"]}
        wanted = {"programs/upgrade": "finished", "programs/report": "cancelled"}
        expect("the report names both programs", holds=fates == wanted)
        interrupted = report["interrupted"] == ["programs/report"]
        expect("the report names what was interrupted", holds=interrupted)

    def planned(self) -> None:
        """What the next start would do."""
        self.title("What the next start will do: only what was interrupted")
        say("  $ reconciled --config reconciled.yaml plan")
        arguments = [COMMAND, "--config", str(self.directory / "reconciled.yaml"), "plan"]
        ended = subprocess.run(  # noqa: S603 - the program that this is about
            arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        quote(ended.stdout + ended.stderr)
        expect(
            "the plan has changes (exit code 1)", holds=ended.returncode == 1 and not ended.stderr
        )
        expect("the report is planned", holds="programs/report" in ended.stdout)
        expect("the upgrade is not", holds="programs/upgrade" not in ended.stdout)


def main() -> int:
    """Tell the story; 1 when something in it was not so."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reconciled-demo-") as name:
        story = Story(Path(name))
        say(f"Everything happens in {name}, which is removed afterwards.")
        try:
            story.tell()
        except NotSo as failure:
            say(f"\nThe demo FAILED: {failure}")
            if story.daemon is not None:
                say("The daemon's log:")
                quote(content(story.daemon.log))
            return 1
        finally:
            if story.daemon is not None:
                story.daemon.end()
    took = time.monotonic() - began
    say(f"\nThat was all, in {took:.0f} s. Each claim above was checked. Next: README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
