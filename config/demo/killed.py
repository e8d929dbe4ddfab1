"""The second half of the demo: SIGKILL in the middle of three operations, and their recovery."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

from narration import PATIENCE, Daemon, Scene, content, expect, quote, say, wait_for

SITES = ("shop", "wiki", "forum")
PAGES = ("index", "news", "about")
MAIL = "forum 2.0 is out"


class Killed(Scene):
    """One SIGKILL; one operation is rolled forward, one is rolled back, and one is held."""

    def __init__(self, directory: Path, parts: Iterator[int]) -> None:
        super().__init__(directory, parts)
        self.mails = directory / "announced.txt"

    def run_all(self) -> None:
        """Run all parts. Raises ClaimFailed."""
        for name in SITES:
            old = self.directory / name / "1.0"
            old.mkdir(parents=True)
            for page in PAGES:
                (old / page).write_text(f"{page}, version 1.0\n")
            (old.parent / "current").symlink_to("1.0")
        self.mails.write_text("wiki 1.0 is out\n")
        self.killed()
        daemon = self.recovered()
        self.resolved(daemon)

    def killed(self) -> None:
        """SIGKILL, with three operations half-done."""
        self.title("SIGKILL, in the middle of three operations with three steps each")
        say("  A plugin deploys three sites, each as an operation. Its first step only reads,")
        say("  the second may run twice, and the third must not.")
        say("  $ cd deploys")
        self.grep(r"request\.operation|operation\.step", "plugins/deploy.py")
        self.show("resources/shop.yaml")
        daemon = self.start()
        daemon.line("daemon.ready")
        wait_for("the forum is announced", lambda: MAIL in content(self.mails))
        for name in ("shop", "wiki"):
            wait_for(f"{name} is half unpacked", (self.directory / name / "2.0/index").exists)
        say("  Two sites are half unpacked now; the third waits for an answer to its announcement.")
        say(f"  $ kill -KILL {daemon.process.pid}")
        daemon.process.send_signal(signal.SIGKILL)
        expect("the daemon is dead", holds=daemon.process.wait(PATIENCE) == -signal.SIGKILL)
        self.sites()
        for name in ("shop", "wiki"):
            expect(f"{name} is half-done", holds=self.half_done(name))
        listed = self.run("journal", "list")
        expect("three operations are open", holds=len(re.findall(r" open ", listed)) == len(SITES))

    def recovered(self) -> Daemon:
        """The next start: forward, back, held."""
        self.title(
            "The next start: one operation is continued, one is undone, one is held for a person"
        )
        self.grep("trials:|interrupted:", "reconciled.yaml")
        say("  Meanwhile a person withdraws version 2.0 of the wiki, which was a trial:")
        trial = self.directory / "trials/wiki.yaml"
        trial.write_text(content(trial).replace("2.0", "1.0"))
        say("  $ sed -i 's/2.0/1.0/' trials/wiki.yaml")
        daemon = self.start()
        daemon.lines(
            ("recovery.decided", "sites/shop"),
            ("recovery.decided", "trials/wiki"),
            ("operation.held", "sites/forum"),
            ("recovery.done", "trials/wiki"),
            ("recovery.done", "sites/shop"),
        )
        self.sites()
        self.show("announced.txt")
        expect("the shop has version 2.0", holds=self.version("shop") == "2.0")
        expect("and all of it", holds=not self.half_done("shop"))
        undone = self.version("wiki") == "1.0" and not list((self.directory / "wiki/2.0").glob("*"))
        expect("nothing is left of the trial", holds=undone)
        expect("the shop is announced once", holds=self.announced("shop") == 1)
        expect("the trial is not", holds=self.announced("wiki") == 0)
        return daemon

    def resolved(self, daemon: Daemon) -> None:
        """A person checks, and decides."""
        self.title("The third was interrupted in a step that must not run twice: a person decides")
        listed = self.run("journal", "list")
        held = re.search(r"^(\S+) .* held +sites/forum", listed, re.MULTILINE)
        expect("the forum's operation is held", holds=held is not None)
        assert held is not None
        self.run("journal", "show", held[1])
        say("  Has the forum been announced? The file shows that it has. One command resolves it.")
        self.run("journal", "resolve", held[1], "--complete", "--why", "announced.txt has it")
        daemon.line("operation.resolved", "sites/forum")
        self.run("journal", "list")
        expect("it was announced once", holds=self.announced("forum") == 1)
        expect("the forum has version 2.0", holds=self.version("forum") == "2.0")
        say(f"  $ kill -TERM {daemon.process.pid}")
        daemon.process.send_signal(signal.SIGTERM)
        daemon.line("stop.ended")
        expect("the stop was clean", holds=daemon.process.wait(PATIENCE) == 0)

    def sites(self) -> None:
        """The version that each site shows, and the pages of the new one."""
        say("  The sites now:")
        for name in SITES:
            new = self.directory / name / "2.0"
            pages = " ".join(page for page in PAGES if (new / page).exists())
            quote(
                f"{name:<5} shows version {self.version(name)}; of 2.0 it has: {pages or 'nothing'}"
            )

    def version(self, name: str) -> str:
        """The version that the site shows."""
        return str((self.directory / name / "current").readlink())

    def half_done(self, name: str) -> bool:
        """Whether some pages of the new version exist, and some do not."""
        there = [(self.directory / name / "2.0" / page).exists() for page in PAGES]
        return any(there) and not all(there)

    def announced(self, name: str) -> int:
        """How often the new version was announced."""
        return content(self.mails).splitlines().count(f"{name} 2.0 is out")
