"""The service as installed in a container: its unit, its files and its journal entries.

The unit is the shipped one; the drop-ins of a test change only what the test is about. Between
tests the guest is as after an installation: no state, configuration, drop-ins or failed units.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import yaml
from container import POLL, Container

UNIT = "reconciled.service"
UNITS = Path(__file__).resolve().parents[2] / "systemd"
PROBE = Path(__file__).resolve().parents[1] / "processes/probe.py"
ETC, STATE = "/etc/reconciled", "/var/lib/reconciled"
PATIENCE = 30.0
# Short enough for tests, which may override it.
STOP = {"drain": "500ms", "critical": "6s", "cleanup": "500ms"}


@attrs.frozen
class Entry:
    """One line of the journal. Values are text, whichever format wrote them."""

    event: str
    fields: dict[str, str]
    message: str

    def fits(self, event: str, wanted: dict[str, Any]) -> bool:
        """Whether it is an *event* line with these fields."""
        same = all(self.fields.get(name) == str(value) for name, value in wanted.items())
        return self.event == event and same


def wait_until(seen: Callable[[], object], what: str, within: float = PATIENCE) -> None:
    """Poll until *seen* is true. Fails, naming *what* was waited for."""
    give_up = time.monotonic() + within
    while not seen():
        assert time.monotonic() < give_up, f"{what}: not seen within {within:g} s"
        time.sleep(POLL)  # the interval of the poll; no result depends on it


def install(container: Container) -> None:
    """Install units and configuration files in *container*, once."""
    for unit in sorted(UNITS.iterdir()):
        if unit.suffix in (".service", ".target", ".socket"):
            container.write(f"/etc/systemd/system/{unit.name}", unit.read_text())
    link = container.root / "usr/local/bin/reconciled"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to("/opt/reconciled/bin/reconciled")
    container.write("/usr/lib/sysusers.d/reconciled.conf", _shipped("reconciled.sysusers.conf"))
    container.run("systemd-sysusers", "/usr/lib/sysusers.d/reconciled.conf")
    container.write("/usr/lib/tmpfiles.d/reconciled.conf", _shipped("reconciled.tmpfiles.conf"))


def _shipped(name: str) -> str:
    return (UNITS / name).read_text()


@attrs.define(eq=False)
class Service:
    """One unit in a container, reconciled.service unless named otherwise."""

    container: Container
    unit: str = UNIT
    cursor: str = attrs.field(default="", init=False)

    def end(self) -> None:
        """Stop it, and kill whatever is left of it."""
        self.systemctl("stop", self.unit, check=False)
        self.systemctl("kill", "--signal=KILL", self.unit, check=False)

    def clean(self) -> None:
        """End it, and restore the state after an installation."""
        self.end()
        for path in (STATE, ETC, "/run/reconciled", "/var/cache/reconciled", self.dropins):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.container.root / path.lstrip("/"))
        self.systemctl("daemon-reload")
        self.systemctl("reset-failed", self.unit, check=False)
        self.container.run("systemd-tmpfiles", "--create", "/usr/lib/tmpfiles.d/reconciled.conf")
        shutil.copy(PROBE, self._made("plugins/probe.py"))
        # An entry of the tests, so that the one at the cursor is never one of the unit.
        self.container.run("logger", "--tag=tests", "a test begins")
        self.container.run("journalctl", "--sync")
        shown = self.container.run("journalctl", "-n", "0", "--show-cursor", "--quiet").stdout
        self.cursor = shown.partition("cursor: ")[2].strip()

    # -- its files ---------------------------------------------------------------

    @property
    def dropins(self) -> str:
        """The directory of its drop-ins."""
        return f"/etc/systemd/system/{self.unit}.d"

    def _made(self, name: str) -> Path:
        path = self.container.root / ETC.lstrip("/") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def file(self, name: str, text: str, *, mode: int = 0o644) -> str:
        """Write a file below /etc/reconciled; its path in the guest. A replacement is atomic."""
        path = self._made(name)
        new = path.with_name(f".{path.name}.new")
        new.write_text(text)
        new.chmod(mode)
        new.replace(path)
        return f"{ETC}/{name}"

    def configure(
        self,
        stop: dict[str, str] | None = None,
        *,
        controllers: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Write the configuration: controllers ``c`` (the probe) and ``x`` (exec) by default.

        *more* are further sections, as ``http={"listen": …}``.
        """
        default = {
            name: {"reconciler": reconciler, "watch": [{"directory": "resources"}]}
            for name, reconciler in {"c": "probe:ProbeReconciler", "x": "exec"}.items()
        }
        data = {
            "stop": stop or STOP,
            "plugins": {"directories": [f"{ETC}/plugins"]},
            "controllers": default if controllers is None else controllers,
        }
        self.file("reconciled.yaml", yaml.safe_dump(data | more))
        self._made("resources/none").parent.chmod(0o755)

    def declare(self, name: str, *, kind: str = "Exec", **spec: Any) -> str:
        """Write the manifest *name*; its path."""
        manifest = {"kind": kind, "metadata": {"name": name}, "spec": spec}
        return self.file(f"resources/{name}.yaml", yaml.safe_dump(manifest))

    def withdraw(self, name: str) -> None:
        """Remove the manifest *name*."""
        self._made(f"resources/{name}.yaml").unlink()

    def script(self, name: str, text: str) -> str:
        """Write a shell program below /etc/reconciled; its path."""
        return self.file(f"programs/{name}", f"#!/bin/sh\n{text}\n", mode=0o755)

    def drop_in(self, text: str, name: str = "50-test.conf") -> None:
        """Write a drop-in of the unit, and have the manager read it."""
        self.container.write(f"{self.dropins}/{name}", text)
        self.systemctl("daemon-reload")

    # -- the manager ---------------------------------------------------------------

    def systemctl(
        self, *words: str, check: bool = True, within: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run systemctl to its end."""
        return self.container.run("systemctl", *words, check=check, within=within)

    def start(self, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``systemctl start``, waiting for the job."""
        done = self.systemctl("start", self.unit, check=False)
        assert not check or done.returncode == 0, f"{done.stderr}\n{self.text()}"
        return done

    def stop(self, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``systemctl stop``."""
        return self.systemctl("stop", self.unit, check=check)

    def restart(self, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``systemctl restart``."""
        return self.systemctl("restart", self.unit, check=check)

    def reload(self, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``systemctl reload``."""
        return self.systemctl("reload", self.unit, check=check)

    def begin(self, verb: str) -> subprocess.Popen[str]:
        """``systemctl VERB`` of the unit, not waited for."""
        return self.container.begin("systemctl", verb, self.unit)

    def kill(self, signal: str) -> None:
        """Send *signal* to the daemon alone."""
        self.systemctl("kill", "--kill-who=main", f"--signal={signal}", self.unit)

    def show(self, *names: str) -> dict[str, str]:
        """Properties of the unit."""
        told = self.systemctl("show", self.unit, f"--property={','.join(names)}").stdout
        return dict(line.split("=", 1) for line in told.splitlines())

    def property(self, name: str) -> str:
        """One property of the unit."""
        return self.show(name)[name]

    def wait_for_state(self, state: str, within: float = PATIENCE) -> None:
        """Wait until ActiveState or SubState is *state*."""
        wait_until(
            lambda: state in self.show("ActiveState", "SubState").values(),
            f"{self.unit} {state}",
            within,
        )

    # -- the journal --------------------------------------------------------------

    def journal(self, *words: str) -> str:
        """The output of journalctl for the unit since the test began."""
        # Not --after-cursor: with a filter it omits the first matching entry.
        after = (f"--cursor={self.cursor}",) if self.cursor else ()
        return self.container.run(
            "journalctl", "--no-pager", *after, "-u", self.unit, *words
        ).stdout

    def text(self) -> str:
        """The same in readable form, for the message of a failure."""
        return self.journal("-o", "short-precise")

    def entries(self) -> list[Entry]:
        """The daemon's lines since the test began."""
        return [_entry(json.loads(line)) for line in self.journal("-o", "json").splitlines()]

    def all(self, event: str, **fields: Any) -> list[Entry]:
        """The lines so far with this event and these fields."""
        return [entry for entry in self.entries() if entry.fits(event, fields)]

    def wait_for(
        self, event: str, *, nth: int = 1, within: float = PATIENCE, **fields: Any
    ) -> Entry:
        """Wait for line number *nth* with this event and these fields, and return it."""
        give_up = time.monotonic() + within
        while len(found := self.all(event, **fields)) < nth:
            told = f"{event} {fields} not seen within {within:g} s"
            assert time.monotonic() < give_up, f"{told}:\n{self.text()}"
            time.sleep(POLL)  # the interval of the poll; no result depends on it
        return found[nth - 1]

    def processes(self) -> list[int]:
        """The processes in the unit's control group, by the guest's numbers."""
        group = self.property("ControlGroup")
        files = (
            (self.container.root / f"sys/fs/cgroup{group}").rglob("cgroup.procs") if group else ()
        )
        found = []
        for file in files:
            with contextlib.suppress(OSError):
                listed = self.container.read(str(file.relative_to(self.container.root)))
                found += [int(word) for word in listed.split()]
        return found


def _entry(fields: dict[str, Any]) -> Entry:
    message = fields.get("MESSAGE") or ""
    if not isinstance(message, str):  # bytes that are not text, or several values
        message = bytes(each for each in message if isinstance(each, int)).decode(errors="replace")
    native = {
        name.removeprefix("RECONCILED_").lower(): str(value)
        for name, value in fields.items()
        if name.startswith("RECONCILED_")
    }
    if not native and message.startswith("{"):
        with contextlib.suppress(ValueError):
            native = {name: _text(value) for name, value in json.loads(message).items()}
    return Entry(native.get("event", ""), native, message)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
