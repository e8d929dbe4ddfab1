"""The second half of the demo: SIGKILL in the middle of three operations, and what comes of it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

from telling import PATIENCE, Daemon, Scene, content, expect, quote, say, wait_for

SITES = ("shop", "wiki", "forum")
PAGES = ("index", "news", "about")
MAIL = "forum 2.0 is out"


class Killed(Scene):
    """One SIGKILL; one operation rolls forward, one back, and one waits for a person."""

    def __init__(self, directory: Path, parts: Iterator[int]) -> None:
        super().__init__(directory, parts)
        self.mails = directory / "announced.txt"

    def tell(self) -> None:
        """All of it. Raises NotSo."""
        for name in SITES:
            old = self.directory / name / "1.0"
            old.mkdir(parents=True)
            for page in PAGES:
                (old / page).write_text(f"{page}, version 1.0\n")
            (old.parent / "current").symlink_to("1.0")
        self.mails.write_text("wiki 1.0 is out\n")
        self.killed()
        daemon = self.recovered()
        self.settled(daemon)

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
        say("  Two are half unpacked now, the third waits for an answer to its announcement.")
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
        self.title("The next start: one goes on, one is undone, one is left to a person")
        self.grep("trials:|interrupted:", "reconciled.yaml")
        say("  And meanwhile somebody takes version 2.0 of the wiki, a trial, back:")
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

    def settled(self, daemon: Daemon) -> None:
        """A person looks, and decides."""
        self.title("The third was cut off in a step that must not run twice: nobody guesses")
        listed = self.run("journal", "list")
        held = re.search(r"^(\S+) .* held +sites/forum", listed, re.MULTILINE)
        expect("the forum's operation is held", holds=held is not None)
        assert held is not None
        self.run("journal", "show", held[1])
        say("  So look: has the forum been announced? It has. One command settles it.")
        self.run("journal", "resolve", held[1], "--complete", "--why", "it stands in announced.txt")
        daemon.line("operation.resolved", "sites/forum")
        self.run("journal", "list")
        expect("it was announced once", holds=self.announced("forum") == 1)
        expect("the forum has version 2.0", holds=self.version("forum") == "2.0")
        say(f"  $ kill -TERM {daemon.process.pid}")
        daemon.process.send_signal(signal.SIGTERM)
        daemon.line("stop.ended")
        expect("the stop was clean", holds=daemon.process.wait(PATIENCE) == 0)

    def sites(self) -> None:
        """Which version each site shows, and what is there of the new one."""
        say("  So it looks now:")
        for name in SITES:
            new = self.directory / name / "2.0"
            pages = " ".join(page for page in PAGES if (new / page).exists())
            quote(
                f"{name:<5} shows version {self.version(name)}; of 2.0 it has: {pages or 'nothing'}"
            )

    def version(self, name: str) -> str:
        """The one that the site shows."""
        return str((self.directory / name / "current").readlink())

    def half_done(self, name: str) -> bool:
        """Whether some pages of the new version are there, and some are not."""
        there = [(self.directory / name / "2.0" / page).exists() for page in PAGES]
        return any(there) and not all(there)

    def announced(self, name: str) -> int:
        """How often the new version was announced."""
        return content(self.mails).splitlines().count(f"{name} 2.0 is out")
