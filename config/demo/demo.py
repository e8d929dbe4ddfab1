"""Runs a real daemon in a temporary directory and shows what it does: ``make demo``.

Every claim that it prints is checked. If one is false, the demo ends with a message, the log of
the daemon and exit code 1. The daemons and the directory are removed in either case.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from killed import Killed
from narration import PATIENCE, ClaimFailed, Daemon, Scene, content, expect, quote, say, wait_for

HERE = Path(__file__).resolve().parent
PLACEHOLDER = "/tmp/reconciled-demo"  # noqa: S108 - a name in the files, replaced in their copy
STEPS = 5  # of programs/upgrade


class Story(Scene):
    """A manifest is applied, changed, drifts, and the daemon is stopped."""

    def __init__(self, directory: Path, parts: Iterator[int]) -> None:
        super().__init__(directory, parts)
        self.site = directory / "site"

    def run_all(self) -> None:
        """Run all parts. Raises ClaimFailed."""
        daemon = self.declared()
        self.changed(daemon)
        self.drifted()
        self.stopped(daemon)
        self.reported()
        self.planned()

    def declared(self) -> Daemon:
        """Two manifests are applied."""
        self.title("The daemon applies what YAML declares: one file, and one program")
        self.show("resources/greeting.yaml", "resources/release.yaml")
        daemon = self.start()
        daemon.line("daemon.ready")
        daemon.line("reconcile.done", "files/greeting")
        site = self.site
        wait_for("the file is there", lambda: content(site / "greeting.txt") == "Welcome.\n")
        wait_for("the program was run", lambda: content(site / "release.txt") == "1.0\n")
        self.show("site/greeting.txt", "site/release.txt")
        return daemon

    def changed(self, daemon: Daemon) -> None:
        """A changed manifest is applied."""
        self.title("A manifest changes, and the daemon applies the change")
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
        """A change by a third party is reverted."""
        self.title(
            "A person edits the managed file; the daemon reverts the change at its next check"
        )
        path = self.site / "greeting.txt"
        wanted = content(path)
        path.write_text("Bob was here.\n")
        say("  $ echo 'Bob was here.' > site/greeting.txt")
        wait_for("the change is reverted", lambda: content(path) == wanted)
        self.show("site/greeting.txt")

    def stopped(self, daemon: Daemon) -> None:
        """A stop, in the middle of a critical operation."""
        self.title("SIGTERM, while two programs run: only one of them is declared critical")
        self.show("later/upgrade.yaml", "later/report.yaml")
        say("  $ mv later/*.yaml resources/")
        for path in (self.directory / "later").iterdir():
            path.rename(self.directory / "resources" / path.name)
        upgrade, report = self.directory / "upgrade.log", self.directory / "report.log"
        wait_for("the report has started", lambda: content(report))
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
        """The report of the stop."""
        self.title("The stop report: what ran after the signal, and what the stop waited for")
        self.show("state/last-stop.txt")
        report = json.loads(content(self.directory / "state/last-stop.json"))
        fates = {each["key"]: each["fate"] for each in report["stragglers"]}
        wanted = {"programs/upgrade": "finished", "programs/report": "cancelled"}
        expect("the report names both programs", holds=fates == wanted)
        interrupted = report["interrupted"] == ["programs/report"]
        expect("the report names what was interrupted", holds=interrupted)

    def planned(self) -> None:
        """The plan of the next start."""
        self.title("The plan of the next start: only what was interrupted")
        planned = self.run("plan", code=1)  # 1: there are changes
        expect("the report is planned", holds="programs/report" in planned)
        expect("the upgrade is not", holds="programs/upgrade" not in planned)


def copy(directory: Path) -> None:
    """Copy the files; only this user may write what decides which programs run."""
    shutil.copytree(
        HERE, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    for configuration in directory.rglob("reconciled.yaml"):
        text = configuration.read_text()
        configuration.write_text(text.replace(PLACEHOLDER, str(directory)))
    (directory / "site").mkdir()
    for path in (directory, *directory.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o022)


def run(scene: Story | Killed) -> bool:
    """Run *scene* to its end. False: a claim was false."""
    try:
        scene.run_all()
    except ClaimFailed as failure:
        say(f"\nThe demo FAILED: {failure}")
        if scene.daemon is not None:
            say("The daemon's log:")
            quote(content(scene.daemon.log))
        return False
    finally:
        if scene.daemon is not None:
            scene.daemon.end()
    return True


def main() -> int:
    """Run the demo. 1: a claim was false."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reconciled-demo-") as name:
        directory, parts = Path(name), itertools.count(1)
        say(f"Everything happens in {name}, which is removed afterwards.")
        copy(directory)
        if not (run(Story(directory, parts)) and run(Killed(directory / "deploys", parts))):
            return 1
    took = time.monotonic() - began
    say(f"\nThat was all, in {took:.0f} s. Each claim above was checked. Next: README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
