"""A container with memory limits, on a machine that has its controllers in cgroup version 1.

systemd-nspawn gives its guest version 2 alone, where such a machine has no memory controller.
This container gets a subtree of every hierarchy, by unshare(1). It is otherwise like the others,
but has no system call filter and no device policy, so only the memory tests use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from container import MASKED, ROOT, TARGET, Container, Missing, _end, _wait_for_boot

NEWEST = 255  # later versions of systemd refuse version 1
MASKED_TOO = (
    *("sys-kernel-debug.mount", "sys-kernel-tracing.mount"),
    "proc-sys-fs-binfmt_misc.automount",
)
# $1 tree, $2 lower root, $3 names of hierarchies, $4 lines SOURCE:TARGET, then the manager's words.
SETUP = r"""
tree=$1 lower=$2 names=$3 binds=$4; shift 4
readonly_bind() { mount --bind "$1" "$2"; mount -o remount,bind,ro "$2"; }
mount -t tmpfs -o mode=755 tmpfs "$tree"; mkdir "$tree"/upper "$tree"/scratch "$tree"/root
layers=lowerdir=$lower,upperdir=$tree/upper,workdir=$tree/scratch
mount -t overlay -o "$layers" overlay "$tree/root"
R=$tree/root
mount -t proc -o nosuid,nodev,noexec proc "$R/proc"; readonly_bind "$R/proc/sys" "$R/proc/sys"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$R/sys"
mount -t tmpfs -o mode=755 tmpfs "$R/dev"
for node in null zero full random urandom tty; do cp -a "/dev/$node" "$R/dev/$node"; done
mkdir "$R"/dev/pts "$R"/dev/shm "$R"/dev/mqueue
ln -s /proc/self/fd "$R/dev/fd"; ln -s pts/ptmx "$R/dev/ptmx"; : >"$R/dev/console"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$R/dev/pts"
mount -t tmpfs tmpfs "$R/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$R/run"
mount -t tmpfs -o mode=1777 tmpfs "$R/tmp"
mount -t tmpfs -o mode=755 tmpfs "$R/sys/fs/cgroup"
mkdir "$R/sys/fs/cgroup/unified"; mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup/unified"
for name in $names; do
    mkdir "$R/sys/fs/cgroup/$name"; option=$name
    [ "$name" != systemd ] || option=none,name=systemd
    mount -t cgroup -o "$option" cgroup "$R/sys/fs/cgroup/$name"
done
while IFS=: read -r from to; do mkdir -p "$R$to"; readonly_bind "$from" "$R$to"; done <<<"$binds"
cp "$tree.target" "$R/etc/systemd/system/container.target"
ip link set lo up 2>/dev/null || true
mkdir "$R/run/host-root"; cd "$R"; pivot_root . run/host-root
umount -l /run/host-root; rmdir /run/host-root
exec env -i container=unshare PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    /lib/systemd/systemd --system "$@"
"""


@contextlib.contextmanager
def booted_with_limits(directory: Path, *binds: str) -> Iterator[Container]:
    """A container as booted() makes it. Raises Missing if none can be made."""
    _check_requirements()
    name = f"container-{uuid.uuid4().hex[:12]}"
    tree = directory / "tree"
    tree.mkdir(parents=True)
    (directory / "tree.target").write_text(TARGET)
    hierarchies = _hierarchies()
    if "memory" not in hierarchies:
        raise Missing("this machine has no memory controller of either version")
    groups = [place / name for place in hierarchies.values()]
    words = ["systemd.unit=container.target", "systemd.show_status=0", "systemd.log_target=journal"]
    words += [f"systemd.mask={unit}" for unit in (*MASKED, *MASKED_TOO)]
    named = " ".join(each for each in hierarchies if each)
    enter = ["unshare", "--mount", "--propagation", "private", "--uts", "--ipc", "--net"]
    enter += ["--cgroup", "--pid", "--fork", "--kill-child"]
    join = 'for group in $1; do echo $$ >"$group/cgroup.procs"; done; shift; exec "$@"'
    container = None
    try:
        for group in groups:
            try:
                group.mkdir()
            except OSError as error:
                raise Missing(f"control groups cannot be made here: {error}") from error
        with (directory / "console.log").open("wb") as console:
            top = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "bash", "-euc", join, name),
                    *(" ".join(map(str, groups)), *enter, "bash", "-euc", SETUP, name),
                    *(str(tree), str(ROOT), named, "\n".join(binds), *words),
                ],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        container = Container(directory, 0, top, groups)
        _wait_for_boot(container)
        yield container
    finally:
        if container is not None and container.leader:
            container.close()
        _end(groups)


def _check_requirements() -> None:
    if os.geteuid() != 0:
        raise Missing("a systemd manager in a container needs root")
    if Path("/run/systemd/system").is_dir():
        raise Missing("this machine runs systemd, which owns its control groups of version 1")
    if shutil.which("unshare") is None:
        raise Missing("unshare is missing (package util-linux)")
    found = (ROOT / "usr/lib").glob("**/libsystemd-shared-*.so")
    versions = [int(match[1]) for each in found if (match := re.search(r"-(\d+)", each.name))]
    if not versions or max(versions) > NEWEST:
        raise Missing(f"the systemd of {ROOT} supports control groups of version 2 only")


def _hierarchies() -> dict[str, Path]:
    """Where this process is in each hierarchy, by its name; empty for version 2."""
    found = {}
    mounted = Path("/sys/fs/cgroup/unified")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        name = names.removeprefix("name=")
        place = mounted if number == "0" else Path("/sys/fs/cgroup") / name
        # A group of cpuset accepts no process before it has processors.
        if name != "cpuset" and place.is_dir():
            found[name] = place / path.strip("/")
    return found
