"""A real systemd manager in a box: nspawn over a throw-away overlay of the machine's own root.

1. Nothing of the machine is changed. Mounts are private, processes are in one control group of
   the box's own, and what the guest writes is gone with it.
2. A box ends whatever happens: by a power-off, then by a kill of its control group.
3. The guest has its own /run, process numbers, network (loopback alone) and journal.

BOX_ROOT names another tree to boot, for other versions of systemd.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

ROOT = Path(os.environ.get("BOX_ROOT", "/"))
BOOT_TAKES = 20.0
OFF_TAKES = 20.0
LOOK = 0.02
# Of the machine's own units, those that a box has no use for, or that cannot run in one.
MASKED = (
    *("systemd-timesyncd.service", "systemd-sysctl.service", "systemd-binfmt.service"),
    *("systemd-resolved.service", "apparmor.service", "dev-hugepages.mount"),
)
# sysinit.target and not basic.target: the machine's own timers and sockets stay off.
TARGET = """\
[Unit]
Description=test box
Requires=sysinit.target
AllowIsolate=yes
Wants=dbus.socket dbus.service systemd-logind.service
After=sysinit.target dbus.socket dbus.service systemd-logind.service
"""
# nspawn refuses "/" itself as its directory: it is bound to another place first. Its lock files
# go to a tmpfs, and all of this is seen by nobody else.
SETUP = """
for group in $1; do echo $$ >"$group/cgroup.procs"; done
mkdir -p /run/systemd/nspawn && mount -t tmpfs -o mode=755,size=1m tmpfs /run/systemd/nspawn
mount --bind "$2" "$3"; shift 3
export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1
exec systemd-nspawn "$@"
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Missing(Exception):
    """What this machine lacks for a box."""


def look_for_means() -> None:
    """Raise Missing where no box can be made here."""
    if os.geteuid() != 0:
        raise Missing("a systemd manager of one's own needs root")
    for program, package in {
        "systemd-nspawn": "systemd-container",
        "nsenter": "util-linux",
        "unshare": "util-linux",
        "setpriv": "util-linux",
    }.items():
        if shutil.which(program) is None:
            raise Missing(f"{program} is missing (package {package})")
    if not any((ROOT / f"usr/bin/{name}").exists() for name in ("dbus-daemon", "dbus-broker")):
        raise Missing(f"there is no message bus in {ROOT} (package dbus)")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        raise Missing("no mount namespace may be made here")


@attrs.define(eq=False)
class Box:
    """One manager with its guest. Made by booted().

    root is the guest's file system, for reading and writing from outside.
    """

    directory: Path
    leader: int  # the guest's process 1, by the machine's numbers
    nspawn: subprocess.Popen[bytes]
    groups: Sequence[Path]

    @property
    def root(self) -> Path:
        """The guest's root directory."""
        return Path(f"/proc/{self.leader}/root")

    @property
    def console(self) -> str:
        """What the guest has written to its console."""
        return (self.directory / "console.log").read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether the guest runs."""
        return self.nspawn.poll() is None

    def command(self, *words: str, environment: Sequence[str] = ()) -> list[str]:
        """What runs *words* as root inside, for whoever starts it by himself."""
        inside = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        plain = [f"PATH={PATH}", "HOME=/root", "LANG=C.UTF-8", "TERM=dumb"]
        plain += ["SYSTEMD_PAGER=", "SYSTEMD_COLORS=0", *environment]
        enter = ["nsenter", "--target", str(self.leader), *inside]
        return [*enter, "env", "-C", "/", "-i", *plain, *words]

    def run(
        self, *words: str, check: bool = True, within: float = 60.0, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run *words* as root inside, to their end; *text* is their standard input."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=within, check=False,
            input=text, errors="replace",
        )  # fmt: skip
        told = f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}"
        assert not check or done.returncode == 0, told
        return done

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Start *words* as root inside, and do not wait."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(*words), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )

    def write(self, path: str, text: str, *, mode: int = 0o644) -> None:
        """Write the guest's file *path*, whose directories are made."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def read(self, path: str) -> str:
        """The guest's file *path*."""
        return (self.root / path.lstrip("/")).read_text(errors="replace")

    def power_off(self) -> None:
        """As an administrator does it; wait_off() waits."""
        self.run("systemctl", "poweroff", check=False)

    def wait_off(self, within: float = OFF_TAKES) -> bool:
        """Wait until the guest is off; whether it is."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.nspawn.wait(within)
        return not self.alive

    def close(self) -> None:
        """Power it off; kill what is left."""
        if self.alive:
            self.run("systemctl", "poweroff", "--force", check=False)
            self.wait_off()
        _end(self.groups)
        self.nspawn.wait(5)


@contextlib.contextmanager
def booted(
    directory: Path, *binds: str, kernel: Sequence[str] = (), network: bool = False
) -> Iterator[Box]:
    """A box whose files are kept in *directory*; off when left.

    binds    "SOURCE:TARGET", seen in the guest and not writable
    kernel   more arguments of its "kernel", as in systemd.journald.forward_to_console=1
    network  whether it shares the machine's network

    Raises Missing where no box can be made.
    """
    look_for_means()
    name = f"box-{uuid.uuid4().hex[:12]}"
    (directory / "root").mkdir(parents=True, exist_ok=True)
    (directory / "box.target").write_text(TARGET)
    options = [f"--directory={directory}/root", "--volatile=overlay", f"--machine={name}"]
    options += ["--quiet", "--boot", "--register=no", "--keep-unit", "--notify-ready=no"]
    options += ["--console=read-only", "--link-journal=no", "--resolv-conf=off", "--timezone=off"]
    options += ["--setenv=SYSTEMD_LOG_TARGET=journal"]
    options += [f"--bind-ro={directory}/box.target:/etc/systemd/system/box.target"]
    options += [f"--bind-ro={bind}" for bind in binds]
    options += [] if network else ["--private-network"]
    arguments = ["systemd.unit=box.target", "systemd.show_status=0", "systemd.log_level=info"]
    arguments += [f"systemd.mask={unit}" for unit in MASKED]
    groups, scope = _groups(name)
    box = None
    try:
        with (directory / "console.log").open("wb") as console:
            nspawn = subprocess.Popen(
                [
                    # A test run that is killed takes its boxes along.
                    *(*scope, "setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--mount", "--propagation", "private"),
                    *("bash", "-euc", SETUP, name, " ".join(map(str, groups))),
                    *(str(ROOT), f"{directory}/root", *options, *arguments, *kernel),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        box = Box(directory, 0, nspawn, groups)
        _wait_for_boot(box)
        yield box
    finally:
        if box is not None and box.leader:
            box.close()
        _end(groups)


def _groups(name: str) -> tuple[list[Path], list[str]]:
    """The box's control groups, and what has to start it where the machine runs systemd."""
    if Path("/run/systemd/system").is_dir():
        scope = ["systemd-run", "--quiet", "--scope", "--collect", f"--unit={name}"]
        return [], [*scope, "-p", "Delegate=yes"]
    groups = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        unified = kind.startswith("cgroup2 ")
        if unified or (kind.startswith("cgroup ") and "name=systemd" in kind):
            groups.append(Path(fields.split()[4]) / name)
    for group in groups:
        try:
            group.mkdir()
        except OSError as error:
            raise Missing(f"no control group may be made here: {error}") from error
    return groups, []


def _wait_for_boot(box: Box) -> None:
    until = time.monotonic() + BOOT_TAKES
    while time.monotonic() < until and box.alive:
        box.leader = box.leader or _leader_below(box.nspawn.pid)
        if box.leader:
            state = box.run("systemctl", "is-system-running", check=False).stdout.strip()
            if state in ("running", "degraded"):
                return
        time.sleep(LOOK)  # between two looks; nobody relies on how long it takes
    if "Failed to" in box.console and not box.leader:
        raise Missing(f"systemd-nspawn cannot boot here: {box.console}")
    raise AssertionError(f"no boot within {BOOT_TAKES:g} s: {box.console}")


def _leader_below(top: int) -> int:
    """The guest's process 1: at most four generations below *top*, and 1 by its own numbers."""
    generation = [top]
    for _ in range(4):
        below = []
        for pid in generation:
            with contextlib.suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    below += [int(word) for word in (thread / "children").read_text().split()]
        for pid in below:
            with contextlib.suppress(OSError):
                numbers = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2]
                if len(words := numbers.splitlines()[0].split()) > 1 and words[-1] == "1":
                    return pid
        generation = below
    return 0


def _end(groups: Sequence[Path]) -> None:
    for group in groups:
        until = time.monotonic() + 5
        while group.exists() and time.monotonic() < until:
            for kill in group.rglob("cgroup.kill"):
                with contextlib.suppress(OSError):
                    kill.write_text("1")
            for inner in sorted(group.rglob("*"), reverse=True):
                if inner.is_dir():
                    with contextlib.suppress(OSError):
                        inner.rmdir()
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(LOOK)  # the kernel needs a moment; nobody relies on how long it takes
