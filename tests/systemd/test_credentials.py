"""Credentials and directories under a real manager: who gets them, and where they never appear."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import yaml
from container import Container
from installed import ETC, STATE, Service, wait_until

VALUE = "tok-Q7x9-first-secret"
NEXT = "tok-Z3w5-second-secret"
LOADS = "[Service]\nLoadCredential=api-token:reconciled-test.token\nRestartSec=100ms\n"
TOKEN = {"TOKEN": {"credential": "api-token"}}
# Records a digest of the secret, not the secret.
NOTES = 'echo "$N $(printf %s "$TOKEN" | sha256sum)" >>$STATE_DIRECTORY/noted'


@attrs.frozen
class Store:
    """``/etc/credstore`` of the guest, in which systemd resolves relative names."""

    container: Container

    def put(self, name: str, value: str) -> None:
        """Write a credential, readable for root alone."""
        self.container.write(f"/etc/credstore/{name}", f"{value}\n", mode=0o600)

    def remove(self, name: str) -> None:
        """Remove it."""
        (self.container.root / "etc/credstore" / name).unlink(missing_ok=True)


@pytest.fixture
def store(container: Container) -> Iterator[Store]:
    """The store; empty afterwards."""
    made = Store(container)
    yield made
    for name in ("reconciled.kubeconfig", "reconciled-test.token"):
        made.remove(name)


def state(service: Service, name: str) -> Path:
    """A file of the state directory, from outside."""
    return service.container.root / STATE.lstrip("/") / name


def noted(service: Service) -> list[str]:
    """The lines that the programs recorded so far: ``N DIGEST``."""
    file = state(service, "noted")
    return [line.rstrip(" -") for line in file.read_text().splitlines()] if file.exists() else []


def line(number: int, value: str) -> str:
    """The line that run *number* records if it finds *value*."""
    return f"{number} {hashlib.sha256(value.encode()).hexdigest()}"


def holders(service: Service, value: str) -> list[str]:
    """The files of state, runtime and cache that hold *value*."""
    places = (STATE, "/run/reconciled", "/var/cache/reconciled")
    found = service.container.run("grep", "-rlaF", "--devices=skip", value, *places, check=False)
    return found.stdout.splitlines()


# -- credentials -----------------------------------------------------------------


def test_a_credential_reaches_its_program_and_nothing_else(service: Service, store: Store) -> None:
    """The program gets the credential; no journal line and no file of the daemon contains it."""
    store.put("reconciled.kubeconfig", VALUE)  # the shipped unit loads it if it exists
    service.configure(state=STATE)
    token = {"TOKEN": {"credential": "kubeconfig"}, "N": "1"}
    service.declare("quiet", apply=[service.script("quiet", NOTES)], environment=token)
    loud = service.script("loud", 'echo "I have $TOKEN"; exit 1')
    service.declare("loud", check=[loud], apply=[loud], environment=token)
    service.start()
    service.wait_for("reconcile.done", key="x/quiet")
    failed = service.wait_for("reconcile.failed", key="x/loud").fields["reason"]
    said = service.container.run("reconciled", "journal", "list", "--json").stdout
    service.stop()
    assert noted(service) == [line(1, VALUE)]
    assert failed.endswith("loud ended with exit code 1: I have [redacted]")
    journal = service.container.run("journalctl", "--no-pager", "-o", "export").stdout
    assert "I have [redacted]" in journal
    assert VALUE not in journal + said
    # A program may print it into its own output file.
    assert {Path(file).name for file in holders(service, VALUE)} == {"check.log", "apply.log"}


def test_a_new_value_comes_with_a_restart(service: Service, store: Store) -> None:
    """A changed value in the store takes effect after a restart, not after a reload."""
    store.put("reconciled-test.token", VALUE)
    service.configure()
    apply = [service.script("notes", NOTES)]
    service.declare("site", apply=apply, environment=TOKEN | {"N": "1"})
    service.drop_in(LOADS)
    service.start()
    wait_until(lambda: len(noted(service)) == 1, "the first run")
    store.put("reconciled-test.token", NEXT)
    service.reload()
    service.declare("site", apply=apply, environment=TOKEN | {"N": "2"})
    wait_until(lambda: len(noted(service)) == 2, "the second run")
    service.restart()
    service.declare("site", apply=apply, environment=TOKEN | {"N": "3"})
    # A new value is not a new spec: after the restart nothing ran before this manifest.
    service.wait_for("reconcile.done", nth=3, key="x/site")
    assert noted(service) == [line(1, VALUE), line(2, VALUE), line(3, NEXT)]


def test_without_its_credential_a_run_fails_and_says_what_to_write(service: Service) -> None:
    """A missing credential fails the run, with the unit line that would load it."""
    service.configure()
    service.declare("site", apply=["true"], environment=TOKEN)
    service.drop_in(LOADS)  # a relative name that is not in the store loads nothing
    service.start()
    reason = service.wait_for("reconcile.failed", key="x/site").fields["reason"]
    assert reason == (
        "cannot set TOKEN in environment: credential api-token was not passed in: write"
        " LoadCredential=api-token:/etc/credstore/api-token in a drop-in of the unit,"
        " and restart it"
    )
    assert service.property("ActiveState") == "active"


def test_an_interrupted_operation_without_its_credential_is_held(
    service: Service, store: Store
) -> None:
    """Without its pinned secret the key is held; it continues after the secret is back."""
    store.put("reconciled-test.token", VALUE)
    service.configure(state=STATE)
    waits = f"{NOTES}; cd $STATE_DIRECTORY; touch running; until [ -e go ]; do sleep 0.02; done"
    service.declare("site", apply=[service.script("waits", waits)], environment=TOKEN | {"N": "1"})
    service.drop_in(LOADS)
    service.start()
    wait_until(state(service, "running").exists, "the program")
    store.remove("reconciled-test.token")
    service.kill("KILL")
    held = service.wait_for("operation.held", key="x/site").fields
    assert held["reason"].startswith(
        "a secret of its pinned spec is missing: credential api-token was not passed in: write"
        " LoadCredential=api-token:"
    )
    assert noted(service) == [line(1, VALUE)]

    store.put("reconciled-test.token", NEXT)
    service.restart()
    state(service, "go").touch()
    resolve = ("reconciled", "journal", "resolve", held["operation"], "--forward", "--why", "back")
    service.container.run(*resolve)
    service.wait_for("recovery.done", key="x/site")
    assert noted(service) == [line(1, VALUE), line(1, NEXT)]
    service.stop()
    assert holders(service, VALUE) == holders(service, NEXT) == []


# -- directories -----------------------------------------------------------------


def test_the_directories_of_the_unit(service: Service) -> None:
    """Programs get the unit's directories and a home, and no variable of the manager."""
    service.configure()
    wants = "STATE|CACHE|RUNTIME|CONFIGURATION|CREDENTIALS"
    text = f"""
cd $STATE_DIRECTORY
env | grep -E '^(HOME|({wants})_DIRECTORY|NOTIFY_.*|WATCHDOG_.*|LISTEN_.*)=' | sort >environment
touch $CACHE_DIRECTORY/x $RUNTIME_DIRECTORY/x $HOME/x && pwd >where
touch $CONFIGURATION_DIRECTORY/x 2>/dev/null || echo refused >>where"""
    service.declare("site", apply=[service.script("looks", text)])
    service.start()
    service.wait_for("reconcile.done", key="x/site")
    assert state(service, "environment").read_text().splitlines() == [
        "CACHE_DIRECTORY=/var/cache/reconciled",
        f"CONFIGURATION_DIRECTORY={ETC}",
        f"HOME={STATE}",
        "RUNTIME_DIRECTORY=/run/reconciled",
        f"STATE_DIRECTORY={STATE}",
    ]
    assert state(service, "where").read_text().splitlines() == [STATE, "refused"]
    told = service.container.run(
        *("stat", "-c", "%n %U:%G %a", STATE, "/var/cache/reconciled", "/run/reconciled", ETC)
    ).stdout
    assert told.splitlines() == [
        f"{STATE} reconciled:reconciled 700",
        "/var/cache/reconciled reconciled:reconciled 700",
        "/run/reconciled reconciled:reconciled 750",
        f"{ETC} root:reconciled 750",
    ]


def split(service: Service) -> None:
    """A configuration of several files, owned by root and readable for its group."""
    service.configure(controllers={}, plugins={"directories": ["plugins"]})
    included = {"p": {"reconciler": "probe:ProbeReconciler", "watch": [{"directory": "../probes"}]}}
    service.file("conf.d/p.yaml", yaml.safe_dump({"controllers": included}))
    manifest = {"kind": "Probe", "metadata": {"name": "a"}, "spec": {"do": "sleep", "seconds": 0}}
    service.file("probes/a.yaml", yaml.safe_dump(manifest))
    service.container.run("chown", "-R", "root:reconciled", ETC)
    service.container.run("chmod", "-R", "u=rwX,g=rX,o=", ETC)


def test_a_configuration_that_its_group_alone_may_read(service: Service) -> None:
    """The service's user reads includes, plugins and manifests of root by its group."""
    split(service)
    service.start()
    service.wait_for("probe.began", key="p/a")


def test_an_included_directory_that_may_not_be_listed_is_refused(service: Service) -> None:
    """A conf.d that the service may not list is not taken as empty: the start fails with 78."""
    split(service)
    service.container.run("chmod", "700", f"{ETC}/conf.d")
    service.start(check=False)
    service.wait_for_state("failed")
    assert service.property("ExecMainStatus") == "78"
    reason = service.wait_for("config.invalid").fields["reason"]
    assert f"{ETC}/conf.d cannot be listed: Permission denied" in reason
