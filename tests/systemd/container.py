"""A real systemd manager in a container: systemd-nspawn over an overlay of the machine's root.

1. The machine is not changed. Mounts are private, all processes are in one control group of the
   container, and what the guest writes is discarded.
2. A container always ends: by a power-off, then by a kill of its control group.
3. The guest has its own /run, process numbers, network (loopback alone) and journal.

CONTAINER_ROOT names another tree to boot, for other versions of systemd.
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

ROOT = Path(os.environ.get("CONTAINER_ROOT", "/"))
BOOT_TAKES = 20.0
OFF_TAKES = 20.0
POLL = 0.02
# Units of the machine that a container does not need, or that cannot run in one.
MASKED = (
    *("systemd-timesyncd.service", "systemd-sysctl.service", "systemd-binfmt.service"),
    *("systemd-resolved.service", "apparmor.service", "dev-hugepages.mount"),
)
# sysinit.target and not basic.target: the timers and sockets of the machine are not started.
TARGET = """\
[Unit]
Description=test container
Requires=sysinit.target
AllowIsolate=yes
Wants=dbus.socket dbus.service systemd-logind.service
After=sysinit.target dbus.socket dbus.service systemd-logind.service
"""
# nspawn refuses "/" as its directory, so it is bind-mounted elsewhere first. Its lock files go to
# a tmpfs, and all of this is visible in its own mount namespace only.
SETUP = """
for group in $1; do echo $$ >"$group/cgroup.procs"; done
mkdir -p /run/systemd/nspawn && mount -t tmpfs -o mode=755,size=1m tmpfs /run/systemd/nspawn
mount --bind "$2" "$3"; shift 3
export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1
exec systemd-nspawn "$@"
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Missing(Exception):
    """This machine lacks what a container needs."""


def check_requirements() -> None:
    """Raise Missing if no container can be made here."""
    if os.geteuid() != 0:
        raise Missing("a systemd manager in a container needs root")
    for program, package in {
        "systemd-nspawn": "systemd-container",
        "nsenter": "util-linux",
        "unshare": "util-linux",
        "setpriv": "util-linux",
    }.items():
        if shutil.which(program) is None:
            raise Missing(f"{program} is missing (package {package})")
    if not any((ROOT / f"usr/bin/{name}").exists() for name in ("dbus-daemon", "dbus-broker")):
        raise Missing(f"{ROOT} has no message bus (package dbus)")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        raise Missing("mount namespaces are not permitted here")


@attrs.define(eq=False)
class Container:
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
        """The output of the guest's console."""
        return (self.directory / "console.log").read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether the guest runs."""
        return self.nspawn.poll() is None

    def command(self, *words: str, environment: Sequence[str] = ()) -> list[str]:
        """The command line that runs *words* as root inside."""
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
        """``systemctl poweroff``; wait_off() waits for its end."""
        self.run("systemctl", "poweroff", check=False)

    def wait_off(self, within: float = OFF_TAKES) -> bool:
        """Wait until the guest is off; whether it is."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.nspawn.wait(within)
        return not self.alive

    def close(self) -> None:
        """Power it off, then kill the processes that are left."""
        if self.alive:
            self.run("systemctl", "poweroff", "--force", check=False)
            self.wait_off()
        _end(self.groups)
        self.nspawn.wait(5)


@contextlib.contextmanager
def booted(
    directory: Path, *binds: str, kernel: Sequence[str] = (), network: bool = False
) -> Iterator[Container]:
    """A container whose files are kept in *directory*; off when left.

    binds    "SOURCE:TARGET", seen in the guest and not writable
    kernel   more arguments of its "kernel", as in systemd.journald.forward_to_console=1
    network  whether it shares the machine's network

    Raises Missing where no container can be made.
    """
    check_requirements()
    name = f"container-{uuid.uuid4().hex[:12]}"
    (directory / "root").mkdir(parents=True, exist_ok=True)
    (directory / "container.target").write_text(TARGET)
    options = [f"--directory={directory}/root", "--volatile=overlay", f"--machine={name}"]
    options += ["--quiet", "--boot", "--register=no", "--keep-unit", "--notify-ready=no"]
    options += ["--console=read-only", "--link-journal=no", "--resolv-conf=off", "--timezone=off"]
    options += ["--setenv=SYSTEMD_LOG_TARGET=journal"]
    options += [f"--bind-ro={directory}/container.target:/etc/systemd/system/container.target"]
    options += [f"--bind-ro={bind}" for bind in binds]
    options += [] if network else ["--private-network"]
    arguments = ["systemd.unit=container.target", "systemd.show_status=0", "systemd.log_level=info"]
    arguments += [f"systemd.mask={unit}" for unit in MASKED]
    groups, scope = _groups(name)
    container = None
    try:
        with (directory / "console.log").open("wb") as console:
            nspawn = subprocess.Popen(
                [
                    # The containers of a test run that is killed are killed too.
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
        container = Container(directory, 0, nspawn, groups)
        _wait_for_boot(container)
        yield container
    finally:
        if container is not None and container.leader:
            container.close()
        _end(groups)


def _groups(name: str) -> tuple[list[Path], list[str]]:
    """The container's control groups, and the command prefix where the machine runs systemd."""
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
            raise Missing(f"control groups cannot be made here: {error}") from error
    return groups, []


def _wait_for_boot(container: Container) -> None:
    until = time.monotonic() + BOOT_TAKES
    while time.monotonic() < until and container.alive:
        container.leader = container.leader or _leader_below(container.nspawn.pid)
        if container.leader:
            state = container.run("systemctl", "is-system-running", check=False).stdout.strip()
            if state in ("running", "degraded"):
                return
        time.sleep(POLL)  # the interval of the poll; no result depends on it
    if "Failed to" in container.console and not container.leader:
        raise Missing(f"systemd-nspawn cannot boot here: {container.console}")
    raise AssertionError(f"no boot within {BOOT_TAKES:g} s: {container.console}")


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
            time.sleep(POLL)  # the interval of the poll; no result depends on it
