"""Credentials in the daemon: stalled controllers, held operations, and redaction."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import pytest
from one_controller import key
from restarts import (
    DIFFERENT,
    UNKNOWN,
    RecoveringReconciler,
    closed_operation,
    ending_of,
    hold_of,
    leave_open_operation,
    operation_act,
    run_restarted,
)
from trio.testing import MockClock
from whole_daemon import WholeDaemon

from reconciled.api import Complete, Decision, Hold, Secret, Wait
from reconciled.config.load import load
from reconciled.journal.operation_record import Ending, Resolution
from reconciled.observe.redaction import REDACTED, Redactor
from reconciled.offline.scan import scan_sources
from reconciled.offline.secrets import check_secrets, credentials_visible
from reconciled.runtime.controllers.loading import PreparedConfig, prepare
from reconciled.runtime.controllers.secrets import redact_credentials, stall_without_secrets

PLUGIN = """
import attrs
from reconciled.api import Reconciler, Secret, done

@attrs.frozen
class Thing:
    token: Secret | None = None

@attrs.frozen
class Settings:
    login: dict[str, Secret]

class Mine(Reconciler[Thing]):
    Options = Settings
    async def reconcile(self, request): return done()
"""
CONFIG = """\
state: s
plugins: {directories: [plugins]}
controllers:
  bad:
    reconciler: mine:Mine
    watch: [{directory: bad}]
    options:
      login:
        token: {credential: absent}
  good: {reconciler: 'mine:Mine', watch: [{directory: d}], options: {login: {a: {credential: t}}}}
"""


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which the service manager has put the credential t."""
    directory = tmp_path / "credentials"
    directory.mkdir()
    (directory / "t").write_text("tok-Q7x9\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(directory))
    return directory


def prepared(tmp_path: Path) -> PreparedConfig:
    (tmp_path / "plugins").mkdir(mode=0o755)
    (tmp_path / "plugins/mine.py").write_text(PLUGIN)
    config = tmp_path / "r.yaml"
    config.write_text(CONFIG)
    for number, name in enumerate(("absent", "t")):
        directory = tmp_path / ("bad", "d")[number]
        directory.mkdir()
        text = f"kind: Thing\nmetadata: {{name: {name}}}\nspec: {{token: {{credential: {name}}}}}\n"
        (directory / "m.yaml").write_text(text)
    (tmp_path / "plugins/mine.py").chmod(0o644)
    config.chmod(0o600)
    return prepare(load(config, {}).config)


def test_options_without_their_secret_stall_one_controller(
    tmp_path: Path, credentials: Path
) -> None:
    """Options that refer to a missing credential stall their controller, with their location."""
    found = stall_without_secrets(prepared(tmp_path))
    assert [ready.config.name for ready in found.ready] == ["good"]
    (stalled,) = found.stalled
    assert stalled.config.name == "bad"
    assert stalled.reason.startswith(
        f"{tmp_path}/r.yaml:9:16: controllers.bad.options.login.token: "
        "credential absent was not passed in: write LoadCredential=absent:"
    )
    assert found.problems == ()


async def test_check_of_secrets(
    tmp_path: Path, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the unit each missing secret is located; outside, one line names all of them."""
    found = prepared(tmp_path)
    scans = await scan_sources(found, {})
    assert credentials_visible()
    (line,) = check_secrets(scans)
    assert line.startswith(
        f"{tmp_path}/bad/m.yaml:1:1: spec.token: credential absent was not passed in: write"
    )
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    assert not credentials_visible()
    (line,) = check_secrets(scans)
    names = "these credentials cannot be checked from here: absent, t;"
    assert line == f"{names} $CREDENTIALS_DIRECTORY is set in the unit alone"
    assert check_secrets([]) == []


def test_credentials_are_redacted_in_the_log(credentials: Path) -> None:
    """Every credential is redacted from the log, whichever code reads it."""
    redactor = Redactor()
    redact_credentials(redactor)
    assert redactor.redact("it printed tok-Q7x9") == f"it printed {REDACTED}"


@attrs.frozen
class Secretive:
    """A spec with a secret."""

    value: int = 0
    token: Secret = attrs.field(factory=lambda: Secret("t"))


async def test_a_missing_secret_holds_an_interrupted_operation(
    tmp_path: Path, autojump_clock: MockClock, credentials: Path
) -> None:
    """An operation whose pinned secret is missing is held with that reason, at once."""
    script = RecoveringReconciler()
    script.observations = [UNKNOWN]
    identity = await leave_open_operation(tmp_path)
    shutil.rmtree(credentials)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.controller.plugin = attrs.evolve(runtime.controller.plugin, spec_class=Secretive)
        await runtime.wait_all_blocked()
        hold = hold_of(runtime)
        assert hold.reason.startswith(
            "a secret of its pinned spec is missing: credential t was not passed in: write Load"
        )
        assert not hold.by_cap
        assert script.calls_for("a") == ["observe", "recover"]
        assert runtime.context.operations.journal.find(identity) is not None


@pytest.mark.parametrize("observed", [UNKNOWN, DIFFERENT])
async def test_a_decision_that_runs_nothing_needs_no_secret(
    tmp_path: Path, autojump_clock: MockClock, credentials: Path, observed: object
) -> None:
    """A decision that runs nothing is carried out although the pinned secret is missing."""
    script = RecoveringReconciler()
    script.observations, script.decision = [observed], Complete("reported by its program")
    identity = await leave_open_operation(tmp_path)
    shutil.rmtree(credentials)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.controller.plugin = attrs.evolve(runtime.controller.plugin, spec_class=Secretive)
        await runtime.wait_all_blocked()
        assert await ending_of(runtime, identity) is Ending.COMPLETED


async def test_wait_does_not_wait_for_a_missing_secret(
    tmp_path: Path, autojump_clock: MockClock, credentials: Path
) -> None:
    """Wait is a hold while the pinned secret is missing, which only a restart can change."""
    script = RecoveringReconciler()
    script.observations, script.decision = [UNKNOWN], Wait(5.0, "no route")
    await leave_open_operation(tmp_path)
    shutil.rmtree(credentials)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.controller.plugin = attrs.evolve(runtime.controller.plugin, spec_class=Secretive)
        await runtime.wait_all_blocked()
        assert "a secret of its pinned spec is missing" in hold_of(runtime).reason


async def test_an_operation_held_for_its_secret_can_be_resolved(
    tmp_path: Path, autojump_clock: MockClock, credentials: Path
) -> None:
    """An operation held for its secret continues by a resolution once the secret is there."""
    script = RecoveringReconciler()
    script.observations, script.acts["a"] = [DIFFERENT], operation_act("one")
    identity = await leave_open_operation(tmp_path)
    (credentials / "t").rename(credentials / "renamed")
    async with run_restarted(tmp_path, script) as runtime:
        runtime.controller.plugin = attrs.evolve(runtime.controller.plugin, spec_class=Secretive)
        await runtime.wait_all_blocked()
        assert hold_of(runtime)
        (credentials / "renamed").rename(credentials / "t")
        await runtime.context.operations.journal.resolve(
            identity, Resolution.FORWARD, who="me", why="back"
        )
        runtime.enqueue("a")
        await runtime.wait_all_blocked()
        assert await ending_of(runtime, identity) is Ending.DONE
        assert runtime.context.store.fingerprint(key("a")) is not None


@pytest.mark.parametrize(
    "decision", [Hold("it printed tok-Q7x9", "tok-Q7x9 was seen"), Complete("it printed tok-Q7x9")]
)
async def test_secrets_are_redacted_in_the_journal(
    tmp_path: Path, autojump_clock: MockClock, credentials: Path, decision: Decision
) -> None:
    """The journal keeps a plugin's reasons with secrets redacted."""
    script = RecoveringReconciler()
    script.decision = decision
    identity = await leave_open_operation(tmp_path)
    async with run_restarted(tmp_path, script) as runtime:
        redact_credentials(runtime.context.logs.redactor)
        # Reasons may quote the output of programs.
        assert runtime.context.children.redact("tok-Q7x9") == REDACTED
        await runtime.wait_all_blocked()
        log = runtime.context.operations.journal
        record = log.find(identity) or await closed_operation(runtime, identity)
        assert REDACTED in repr(record)
        assert "tok-Q7x9" not in repr(record)
    state = tmp_path / "state"
    kept = [path.read_bytes() for path in state.rglob("*") if path.is_file()]
    assert not any(b"tok-Q7x9" in data for data in kept)


async def test_c13_a_reload_stalls_what_lacks_its_secret(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, credentials: Path
) -> None:
    """At a reload too, options without their secret stall their own controller alone."""
    whole_daemon.plugin("secretive", PLUGIN)
    whole_daemon.configure("a")
    async with whole_daemon.running() as daemon:
        login = "options: {login: {token: {credential: absent}}}}"
        whole_daemon.configure("a", f"b: {{reconciler: 'secretive:Mine', {login}")
        await whole_daemon.reload()
        (line,) = whole_daemon.log_lines("controller.stalled")
        assert line["controller"] == "b"
        assert "b.options.login.token: credential absent was not passed in" in line["reason"]
        assert sorted(daemon.controllers) == ["a"]
        assert whole_daemon.log_lines("reload.done")[0]["stalled"] == ["b"]


async def test_secrets_are_redacted_in_the_stop_report(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, credentials: Path
) -> None:
    """The stop report gives the cause of a crash with secrets redacted."""
    whole_daemon.configure("a")
    async with whole_daemon.running() as daemon:
        redact_credentials(daemon.logs.redactor)
        daemon.context.stop.crash("crash: KeyError('tok-Q7x9')")
    for name in ("last-stop.json", "last-stop.txt"):
        text = (whole_daemon.state / name).read_text()
        assert f"crash: KeyError('{REDACTED}')" in text
        assert "tok-Q7x9" not in text
