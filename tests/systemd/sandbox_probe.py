"""Run by the daemon inside its unit: tries calls that a sandbox may refuse, reports to argv[1].

It uses the standard library alone, since it runs with the Python of the guest.
"""

import ctypes
import fcntl
import json
import mmap
import os
import resource
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
REPORT = Path(sys.argv[1])
HERE = Path(tempfile.mkdtemp(dir=REPORT.parent))


def call(result: int) -> None:
    """Raise the error of a C function that failed."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def callback() -> None:
    """Qsort with a comparison in Python: ctypes makes code for it."""
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int)
    )
    values = (ctypes.c_int * 3)(3, 1, 2)
    LIBC.qsort(values, 3, ctypes.sizeof(ctypes.c_int), kind(lambda a, b: a[0] - b[0]))
    if list(values) != [1, 2, 3]:
        raise OSError("not sorted")


def thread() -> None:
    """A thread that runs."""
    done = threading.Event()
    threading.Thread(target=done.set).start()
    if not done.wait(5):
        raise OSError("no thread")


def database() -> None:
    """SQLite with a write-ahead log."""
    connection = sqlite3.connect(HERE / "db")
    if connection.execute("PRAGMA journal_mode=WAL").fetchone() != ("wal",):
        raise OSError("no write-ahead log")
    connection.execute("CREATE TABLE t (a)")
    connection.commit()
    connection.close()


def inotify() -> None:
    """A watch of the configuration, which belongs to root."""
    descriptor = LIBC.inotify_init1(0)
    call(descriptor)
    call(LIBC.inotify_add_watch(descriptor, b"/etc/reconciled", 0x100))


def listener(family: int, address: object) -> None:
    """A listener, and a connection to it."""
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen()
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.connect(server.getsockname())


def bus() -> None:
    """A connection to the system bus."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect("/run/dbus/system_bus_socket")


def write(path: str) -> None:
    """A new file at *path*."""
    Path(path).write_text("x")


def change_mode() -> None:
    """Another mode for a file of our own."""
    path = HERE / "mode"
    path.write_text("x")
    path.chmod(0o640)
    if stat.S_IMODE(path.stat().st_mode) != 0o640:
        raise OSError("mode not changed")


def link() -> None:
    """A second name, and both synced."""
    (HERE / "one").write_text("x")
    (HERE / "two").hardlink_to(HERE / "one")


def sync() -> None:
    """A file and its directory on disk."""
    for path, flags in ((HERE / "synced", os.O_CREAT | os.O_WRONLY), (HERE, os.O_RDONLY)):
        descriptor = os.open(path, flags)
        os.fsync(descriptor)
        os.close(descriptor)


def lock() -> None:
    """A lock of the kernel."""
    with (HERE / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def own_chown() -> None:
    """A change of owner to the owner that it has."""
    path = HERE / "owned"
    path.write_text("x")
    os.chown(path, os.getuid(), os.getgid())


def setgid_bit() -> None:
    """A file with the setgid bit."""
    path = HERE / "setgid"
    path.write_text("x")
    path.chmod(0o2755)


def control_group() -> None:
    """A control group below our own."""
    line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    Path(f"/sys/fs/cgroup{line.partition('::')[2]}/below").mkdir()


def kernel_log() -> None:
    """The log of the kernel."""
    call(LIBC.klogctl(10, None, 0))


def writable_code() -> None:
    """Memory that may be written and run."""
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)


TRIALS: dict[str, Callable[[], object]] = {
    "ctypes callback": callback,
    "thread": thread,
    "sqlite wal": database,
    "inotify": inotify,
    "pidfd": lambda: os.close(os.pidfd_open(os.getpid())),
    "memfd": lambda: os.close(os.memfd_create("probe")),
    "setrlimit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    # A name would ask for files that a guest may lack.
    "getaddrinfo": lambda: socket.getaddrinfo("127.0.0.1", 80, flags=socket.AI_ADDRCONFIG),
    "interface names": socket.if_nameindex,
    "unix listener": lambda: listener(socket.AF_UNIX, str(HERE / "socket")),
    "tcp listener": lambda: listener(socket.AF_INET, ("127.0.0.1", 0)),
    "boot id": lambda: Path("/proc/sys/kernel/random/boot_id").read_text(),
    "system bus": bus,
    "own directory": lambda: write(str(HERE / "file")),
    "chmod": change_mode,
    "link": link,
    "fsync": sync,
    "flock": lock,
    "child": lambda: subprocess.run(["/bin/true"], check=True),
    "clock": lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    "write /etc": lambda: write("/etc/reconciled/probe"),
    "write /opt": lambda: write("/opt/probe"),
    "write /usr": lambda: write("/usr/local/probe"),
    "write /root": lambda: write("/root/probe"),
    "write state of others": lambda: write("/var/lib/probe"),
    "nice": lambda: os.nice(1),
    "affinity": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "user namespace": lambda: call(LIBC.unshare(CLONE_NEWUSER)),
    "mount": lambda: call(LIBC.mount(b"none", str(HERE).encode(), b"tmpfs", 0, None)),
    "chroot": lambda: os.chroot("/"),
    "setgid bit": setgid_bit,
    "own chown": own_chown,
    "control group": control_group,
    "raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    "kernel log": kernel_log,
    "writable code": writable_code,
    "realtime": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
}


# Those that the guest has: what a reconciler of clusters calls.
TOOLS = {
    "kubectl": ["kubectl", "create", "configmap", "x", "--dry-run=client", "--output=yaml"],
    "helm": ["helm", "create", str(HERE / "chart")],
}


def tool(arguments: list[str]) -> Callable[[], object]:
    """A trial that runs *arguments*."""
    return lambda: subprocess.run(arguments, check=True, capture_output=True)


def main() -> None:
    """Try everything; the report appears whole."""
    found = {}
    tools = {name: tool(words) for name, words in TOOLS.items() if shutil.which(name)}
    for name, trial in (TRIALS | tools).items():
        try:
            trial()
        except (OSError, subprocess.CalledProcessError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "works"
    new = REPORT.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.rename(REPORT)


main()
