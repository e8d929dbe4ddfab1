"""Installation and removal of the service, several daemons on one machine, and a boot."""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from container import Container, Missing, booted
from installed import Service, wait_until
from program import CHECKOUT, LOCK, guest_python

INSTALLER = ("env", "WHEELS=/mnt/wheels", "/mnt/source/systemd/install.sh")
NAMES = ("web", "mail")
SHOWN = CHECKOUT / "docs/systemd.md"


# -- install-service, uninstall-service ---------------------------------------------------------


@pytest.fixture(scope="module")
def wheels() -> Path:
    """The locked packages for the guest's Python, fetched once: a container has no network."""
    try:
        version = guest_python()
    except Missing as missing:
        pytest.skip(str(missing))
    key = hashlib.sha256(LOCK.read_bytes() + version.encode()).hexdigest()[:16]
    target = CHECKOUT / f".container/wheels-{key}"
    target.parent.mkdir(exist_ok=True)
    with (target.parent / "wheels-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            new = target.with_suffix(".new")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
            pip += ["--require-hashes", "--only-binary=:all:", f"--python-version={version}"]
            subprocess.run([*pip, f"--dest={new}", "-r", str(LOCK)], check=True, timeout=100)
            new.rename(target)
    return target


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Iterator[Container]:
    """A machine without the program or a network, and a read-only checkout."""
    # A copy, since an edit of the checkout meanwhile would be another version.
    source = tmp_path_factory.mktemp("source")
    for name in ("reconciled", "systemd", "requirements"):
        shutil.copytree(CHECKOUT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    binds = (f"{source}:/mnt/source", f"{wheels}:/mnt/wheels")
    try:
        with booted(tmp_path_factory.mktemp("machine"), *binds) as made:
            asked = made.run("/usr/bin/python3", "-c", "import ensurepip, venv", check=False)
            if asked.returncode:
                pytest.skip("the guest's Python makes no environments (package python3-venv)")
            yield made
    except Missing as missing:
        pytest.skip(str(missing))


def there(machine: Container, path: str) -> bool:
    """Whether the guest has *path*; links are not followed, since they lead outside."""
    return machine.run("test", "-L", path, "-o", "-e", path, check=False).returncode == 0


def test_an_installation_from_its_first_day_to_its_last(machine: Container) -> None:
    """One command installs and upgrades, one removes; state and configuration are kept."""
    service = Service(machine)
    configuration = "/etc/reconciled/reconciled.yaml"
    told = machine.run(*INSTALLER, "install", within=100).stdout
    assert [line[:2] for line in told.splitlines()[-3:]] == ["1.", "2.", "3."]
    assert "systemctl enable --now reconciled" in told
    owner = machine.run("stat", "--format=%U:%G %a", configuration).stdout.strip()
    assert owner == "root:reconciled 640"

    # The three commands of the output work.
    machine.run("reconciled", "check")
    service.systemctl("enable", "--now", "reconciled")
    assert service.property("ActiveState") == "active"
    pid = service.property("MainPID")

    # An upgrade is the same command; the daemon runs until it is restarted. Here it is the same
    # version again, which does not replace the files of the running daemon.
    mine = machine.read(configuration) + "stop: {drain: 1s}\n"
    machine.write(configuration, mine, mode=0o640)
    told = machine.run(*INSTALLER, "install", within=100).stdout
    assert "already" in told
    assert "systemctl restart reconciled" in told
    assert machine.read(configuration) == mine
    assert service.property("MainPID") == pid
    service.restart()

    told = machine.run(*INSTALLER, "uninstall").stdout
    assert service.property("LoadState") == "not-found"
    for path in ("/opt/reconciled", "/usr/local/bin/reconciled", "/etc/sysusers.d/reconciled.conf"):
        assert not there(machine, path)
    assert machine.read(configuration) == mine
    assert there(machine, "/var/lib/reconciled/store")
    assert "/var/lib/reconciled" in told
    assert "/etc/reconciled" in told
    machine.run("getent", "passwd", "reconciled")


def test_a_directory_of_another_program_is_left_alone(machine: Container) -> None:
    """The installer refuses a PREFIX that it did not make, and changes nothing."""
    machine.write("/srv/other/precious", "x")
    told = machine.run("env", "PREFIX=/srv/other", *INSTALLER[1:], "install", check=False)
    assert told.returncode == 1
    assert "/srv/other is there and not ours" in told.stderr
    machine.run("env", "PREFIX=/srv/other", *INSTALLER[1:], "uninstall", check=False)
    assert machine.read("/srv/other/precious") == "x"


# -- several daemons ------------------------------------------------------------------------


@pytest.fixture
def instances(container: Container) -> Iterator[dict[str, Service]]:
    """Two daemons, configured as docs/systemd.md says, with a manifest each."""
    made = {name: Service(container, f"reconciled@{name}.service") for name in NAMES}
    for name in NAMES:
        shown = re.findall(r"^(?:install|sed) .*-web.*$", SHOWN.read_text(), re.MULTILINE)
        assert len(shown) == 2
        for line in shown:
            container.run(
                "env", "-C", "/opt/checkout", "sh", "-c", line.replace("-web", f"-{name}")
            )
        words = ["/bin/sh", "-c", f"echo {name} >> /var/lib/reconciled-{name}/applied"]
        manifest = {"kind": "Exec", "metadata": {"name": name}, "spec": {"apply": words}}
        container.write(f"/etc/reconciled-{name}/resources/x.yaml", yaml.safe_dump(manifest))
    container.run("systemctl", "daemon-reload")
    yield made
    container.run(
        "systemctl", "disable", "--now", "reconciled.target", *(s.unit for s in made.values())
    )
    for name in NAMES:
        for parent in ("etc", "var/lib", "var/cache"):
            shutil.rmtree(container.root / parent / f"reconciled-{name}", ignore_errors=True)


def applied(container: Container, name: str) -> str:
    """The record of the instance *name*."""
    path = container.root / f"var/lib/reconciled-{name}/applied"
    return path.read_text() if path.exists() else ""


def test_two_daemons_share_nothing(container: Container, instances: dict[str, Service]) -> None:
    """Each instance has its own state, configuration, socket and work."""
    for service in instances.values():
        service.start()
    for name in NAMES:
        wait_until(lambda name=name: applied(container, name) == f"{name}\n", f"{name} applied")
        assert (container.root / f"run/reconciled-{name}/control.sock").is_socket()
    web, mail = instances["web"], instances["mail"]
    before = mail.property("MainPID")
    web.reload()
    web.kill("KILL")
    wait_until(lambda: web.property("NRestarts") == "1", "a restart of one")
    web.wait_for_state("active")
    assert (mail.property("MainPID"), mail.property("NRestarts")) == (before, "0")


def test_the_target_is_all_of_them(container: Container, instances: dict[str, Service]) -> None:
    """Enabled instances start with the machine, and stop and start with the target."""
    units = [service.unit for service in instances.values()]
    container.run("systemctl", "enable", "reconciled.target", *units)
    wanted = container.run(
        "systemctl", "show", "--property=Wants", "--value", "multi-user.target"
    ).stdout
    assert "reconciled.target" in wanted.split()
    # The nearest to a boot in a container: all other units stop, and the target starts.
    container.run("systemctl", "start", "reconciled.target")
    first = {service.unit: service.property("MainPID") for service in instances.values()}
    assert "0" not in first.values()
    container.run("systemctl", "isolate", "container.target")
    for service in instances.values():
        service.wait_for_state("inactive")
        assert service.property("Result") == "success"
    container.run("systemctl", "start", "reconciled.target")
    for name, service in instances.items():
        assert service.property("ActiveState") == "active"
        # The state was kept, so nothing is applied again.
        service.wait_for("daemon.ready", nth=2)
        assert applied(container, name) == f"{name}\n"
