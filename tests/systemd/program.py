"""The program as an installed service has it: an environment in /opt with the checkout's code.

The Python of the tests builds it for the Python of the guest, so that a guest needs only an
interpreter. ``.container`` in the checkout keeps it until the lock file changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

from container import ROOT, Missing

CHECKOUT = Path(__file__).resolve().parents[2]
LOCK = CHECKOUT / "requirements/run.txt"
HOME = "/opt/reconciled"
SCRIPT = f"""\
#!{HOME}/bin/python3
import sys
from reconciled.cli import main
sys.exit(main())
"""


def guest_python() -> str:
    """The guest's version of Python, as 3.11. Raises Missing."""
    found = sorted((ROOT / "usr/bin").glob("python3.[0-9]*[0-9]"))
    for python in found:
        version = python.name.removeprefix("python")
        if version.replace(".", "").isdecimal() and int(version.partition(".")[2]) >= 11:
            return version
    raise Missing(f"{ROOT}/usr/bin has no Python 3.11 or later (package python3)")


def binds() -> list[str]:
    """The bind mounts that put the program at /opt/reconciled of a guest. Raises Missing."""
    version = guest_python()
    key = hashlib.sha256(LOCK.read_bytes() + version.encode()).hexdigest()[:16]
    opt = CHECKOUT / f".container/{key}"
    opt.parent.mkdir(exist_ok=True)
    with (opt.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (opt / "made").exists():
            _make(opt / "reconciled", version)
            (opt / "made").touch()
        # The guest cannot write byte code: each of its starts would compile everything.
        _run("-m", "compileall", "-q", str(CHECKOUT / "reconciled"))
    packages = f"{HOME}/lib/python{version}/site-packages"
    return [
        f"{opt}:/opt",
        f"{CHECKOUT}/reconciled:{packages}/reconciled",
        f"{CHECKOUT}:/opt/checkout",
    ]


def _make(home: Path, version: str) -> None:
    packages = home / f"lib/python{version}/site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    (home.parent / "checkout").mkdir(exist_ok=True)
    (home / "bin").mkdir(exist_ok=True)
    (home / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {version}\n")
    for name in ("python3", f"python{version}"):
        (home / "bin" / name).unlink(missing_ok=True)
        (home / "bin" / name).symlink_to(f"/usr/bin/python{version}")
    script = home / "bin/reconciled"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    pip += ["--upgrade", f"--target={packages}"]
    wheels = [f"--python-version={version}", "--only-binary=:all:", "--require-hashes"]
    _run(*pip, *wheels, "--no-deps", "-r", str(LOCK))
    _run(*pip, "--no-deps", "--no-build-isolation", str(CHECKOUT))
    # Byte code that was compiled under another umask is unreadable for the service's user.
    for path in (home.parent, *home.parent.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))


def _run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=CHECKOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
