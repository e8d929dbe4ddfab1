"""``journal list``, ``show`` and ``resolve``, without a daemon or with a simulated one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from desk import Desk

from reconciled.cli.journal import resolve
from reconciled.cli.journal.operation_format import format_list, format_operation
from reconciled.core.errors import StateLocked
from reconciled.core.resources import Key
from reconciled.journal import resolutions
from reconciled.journal.host_identity import HostIdentity
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import (
    Ending,
    Hold,
    OperationRecord,
    Resolution,
    StepRecord,
    StepState,
)
from reconciled.journal.sqlite.store import Store
from reconciled.journal.state_lock import StateLock, probe
from reconciled.programs import attempt_fence, steps

BEGUN = 1_800_000_000.0
ID = "01JE00000000000000000000"
PINNED = {
    "kind": "Note",
    "name": "a",
    "namespace": None,
    "spec": {"text": "secret"},
    "fingerprint": "f1",
    "labels": {},
    "annotations": {},
    "file": "/etc/m/a.yaml",
    "base": "/etc/m",
    "removal": False,
}
HOLD = Hold(
    "step switch must run only once, was started, and has no result", "decision", "exit 1", BEGUN
)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times are shown in local time: here that is UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def in_journal(desk: Desk, act: Callable[[OperationJournal], Awaitable[Any]]) -> Any:
    """What *act* returns, called with the journal as a daemon that has ended."""
    desk.state.mkdir(mode=0o700, exist_ok=True)

    async def run() -> Any:
        store = Store.open(desk.state)
        operations = OperationJournal.load(
            store, identity=HostIdentity("boot", "machine"), now=lambda: BEGUN
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            given = await act(operations)
            nursery.cancel_scope.cancel(reason="written")
        return given

    return trio.run(run)


def held(desk: Desk, key: str = "c/a", hold: Hold | None = HOLD) -> str:
    """The id of an operation that is held after its first step."""

    async def act(operations: OperationJournal) -> str:
        record = await operations.begin(Key(key), "upgrade", PINNED)
        await operations.record_step_done(record.id, "fetch", "idempotent", {"bytes": 3})
        await operations.record_step_started(record.id, "switch", "once")
        if hold is not None:
            await operations.hold(record.id, hold)
        return record.id

    identity: str = in_journal(desk, act)
    return identity


def degraded(desk: Desk) -> None:
    """Mark the store as degraded."""
    store = Store.open(desk.state)
    store.writer.meta = attrs.evolve(store.writer.meta, degraded="lost")
    store.close()


def past(desk: Desk, ending: Ending = Ending.DONE) -> str:
    """The id of a past operation."""

    async def act(operations: OperationJournal) -> str:
        record = await operations.begin(Key("c/old"), "upgrade", PINNED)
        await operations.end(record.id, ending, note="reason")
        return record.id

    identity: str = in_journal(desk, act)
    return identity


# -- list -------------------------------------------------------------------------------------


def test_nothing_is_open(desk: Desk) -> None:
    """Without a store, and with an empty one, list reports no open operation, with exit code 0."""
    desk.configure()
    for notice in (["@/state does not exist: no daemon has used it yet"], []):
        assert desk.say("journal", "list").lines == [*notice, "No operation is open."]
        said = desk.say("journal", "list", "--json")
        assert (said.code, said.data) == (0, [])
        desk.apply("c/x")


def test_the_format_of_the_list(desk: Desk) -> None:
    """Open operations come first, then past ones."""
    desk.configure()
    over, waiting = past(desk), held(desk)
    said = desk.say("journal", "list")
    assert said.code == 0
    assert said.out == (
        f"{'ID':<26}  BEGUN                      STATE  KEY  OPERATION  LAST STEP\n"
        f"{waiting}  2027-01-15 08:00:00+00:00  held   c/a  upgrade    fetch\n"
        "\n"
        "1 held: reconciled journal show ID shows why, and how to resolve it.\n"
        "\n"
        f"{'ID':<26}  ENDED                      STATE  KEY    OPERATION  LAST STEP\n"
        f"{over}  2027-01-15 08:00:00+00:00  done   c/old  upgrade    -\n"
    )
    data = desk.say("journal", "list", "--json").data
    assert [(each["id"], each["state"]) for each in data] == [(waiting, "held"), (over, "done")]
    assert desk.say("journal", "list", "--limit", "0", "--json").data == data[:1]


# -- show -------------------------------------------------------------------------------------


def test_the_format_of_one_operation() -> None:
    """Show prints its key, progress, hold, and the commands that resolve it."""
    record = OperationRecord(
        f"{ID}01", Key("c/a"), "upgrade", 2, 5, PINNED, BEGUN, hold=HOLD, critical=True
    )
    record = attrs.evolve(record, steps=STEPS)
    text = format_operation(
        record,
        None,
        ["its program apply of attempt 1 has ended; its exit was not recorded"],
        ["/state/operations/x/apply.log"],
        now=BEGUN + 7300,
        can_undo=True,
    )
    assert text == GOLDEN


STEPS = (
    StepRecord("fetch", "idempotent", StepState.DONE, {"bytes": 3}),
    StepRecord("switch", "once", StepState.STARTED),
)
GOLDEN = f"""\
{ID}01: held
  key        c/a
  operation  upgrade (attempt 2, critical)
  begun      2027-01-15 08:00:00+00:00, 2h ago
  manifest   /etc/m/a.yaml, as it was then

Progress:
  fetch   idempotent  done
    {{"bytes": 3}}
  switch  once        started, no result recorded: it may or may not have taken effect
  its program apply of attempt 1 has ended; its exit was not recorded

Held since 2027-01-15 08:00:00+00:00:
  step switch must run only once, was started, and has no result
  exit 1

Check the actual state, then resolve the operation with one of these:
  reconciled journal resolve {ID}01 --complete --why "…"
      it is done: record that, and run nothing
  reconciled journal resolve {ID}01 --forward --why "…"
      continue the same operation at the step that it reached
  reconciled journal resolve {ID}01 --back --why "…"
      undo what it did, in a new operation
  reconciled journal resolve {ID}01 --abandon --why "…"
      close it, neither done nor undone; the next reconcile starts over

Output of its programs:
  /state/operations/x/apply.log"""


def test_show_prints_steps_and_output_of_programs(desk: Desk) -> None:
    """A prefix of the id is enough; steps that a program recorded and its output are shown."""
    desk.configure()
    identity = held(desk)
    directory = desk.state / "operations" / identity
    directory.mkdir(parents=True)
    attempt_fence.fence(directory, 1)
    steps.record_step(str(directory), 1, "copied")
    (directory / "apply.log").write_text("x")
    said = desk.say("journal", "show", identity[:-2].lower())
    assert said.code == 0
    assert said.lines[0] == f"{identity}: held"
    assert "  steps recorded by its program: copied (attempt 1)" in said.lines
    assert f"  @/state/operations/{identity}/apply.log" in said.lines
    assert "--back" not in said.out
    data = desk.say("journal", "show", identity, "--json").data
    assert data["hold"]["reason"] == HOLD.reason
    assert data["output"] == [f"@/state/operations/{identity}/apply.log"]
    assert [step["state"] for step in data["steps"]] == ["done", "started"]
    assert len(data["commands"]) == 3


def test_show_does_not_print_the_spec(desk: Desk) -> None:
    """The pinned spec is left out: it may contain secrets, and output is pasted elsewhere."""
    desk.configure()
    identity = held(desk)
    for arguments in ((), ("--json",)):
        assert "secret" not in desk.say("journal", "show", identity, *arguments).out


def test_an_unknown_or_ambiguous_id(desk: Desk) -> None:
    """An unknown id is exit code 4, and so is an ambiguous prefix, whose matches are printed."""
    desk.configure()
    first, second = held(desk), held(desk, "c/b")
    for action in (("show",), ("resolve", "--abandon", "--why", "x")):
        said = desk.say("journal", action[0], "7Z", *action[1:])
        assert (said.code, said.out) == (4, "")
        assert said.lines == ["there is no operation 7Z: reconciled journal list shows the ids"]
        said = desk.say("journal", action[0], "0", *action[1:])
        assert said.code == 4
        assert said.lines[0] == "0 is ambiguous: matches 2 operations; write more of the id:"
        assert {line.split()[0] for line in said.lines[1:]} == {first, second}
    assert not (desk.state / "resolutions").exists()


def test_control_codes_reach_no_terminal() -> None:
    """Control codes and line breaks in names, reasons and evidence are replaced."""
    hold = attrs.evolve(HOLD, reason="a\x1b[2Jb", evidence="c\nd\re")
    record = OperationRecord(f"{ID}01", Key("c/a"), "na\nme", 1, 1, PINNED, BEGUN, hold=hold)
    text = format_operation(record, None, ["x\x07"], [], now=BEGUN, can_undo=False) + format_list(
        [record], [], {}
    )
    assert not set("\x1b\r\x07") & set(text)
    assert "a\N{REPLACEMENT CHARACTER}[2Jb" in text
    assert "na\nme" not in text


def test_show_prints_how_a_past_operation_ended(desk: Desk) -> None:
    """Show prints the ending of a past operation, who decided it, and why."""
    desk.configure()
    identity = held(desk)

    async def abandon(operations: OperationJournal) -> None:
        await operations.resolve(identity, Resolution.ABANDON, "eve (uid 7)", "not needed")

    in_journal(desk, abandon)
    said = desk.say("journal", "show", identity)
    assert said.lines[0] == f"{identity}: abandoned"
    assert said.lines[-1] == "  2027-01-15 08:00:00+00:00  eve (uid 7): abandon: not needed"
    assert "resolve" not in said.out


def test_reading_writes_nothing(desk: Desk) -> None:
    """List and show change no file of the state, nor its times."""
    desk.configure()
    identity = held(desk)
    before = desk.tree()
    assert desk.say("journal", "list").code == 0
    assert desk.say("journal", "show", identity).code == 0
    assert desk.tree() == before


def test_a_running_daemon_is_named(desk: Desk) -> None:
    """While a process holds the state, list and show print the current state and its pid."""
    desk.configure()
    identity = held(desk)
    lock = StateLock.acquire(desk.state)
    try:
        for action in (("list",), ("show", identity)):
            said = desk.say("journal", *action)
            assert said.code == 0
            assert identity in said.out
            running = f"a daemon (pid {os.getpid()}) is running on @/state"
            assert said.err == f"{running}: this is its current state\n"
    finally:
        lock.release()


def test_the_configuration_may_be_invalid(desk: Desk) -> None:
    """With --state, everything but --back works without a valid configuration."""
    desk.configure()
    identity = held(desk)
    desk.write("r.yaml", "controllers: [")
    assert desk.say("journal", "list").code == 78
    state = ("--state", str(desk.state))
    assert identity in desk.say("journal", "list", *state).out
    assert desk.say("journal", "show", identity, *state).code == 0
    said = desk.say("journal", "resolve", identity, "--back", "--why", "x", *state)
    assert said.code == 1
    assert "cannot be asked, since the configuration is invalid: @/r.yaml:" in said.err
    assert desk.say("journal", "resolve", identity, "--abandon", "--why", "x", *state).code == 0


# -- resolve ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("X", "--why", "x"),
        ("X", "--abandon"),
        ("X", "--abandon", "--why", " "),
        ("X", "--abandon", "--forward", "--why", "x"),
        ("--abandon", "--why", "x"),
        ("X", "--all", "--abandon", "--why", "x"),
        ("--all", "--complete", "--why", "x"),
    ],
)
def test_a_decision_needs_one_operation_one_option_and_a_reason(
    desk: Desk, arguments: tuple[str, ...]
) -> None:
    """A missing or doubled option, reason or id is wrong usage: 2, and nothing is written."""
    desk.configure()
    held(desk)
    assert desk.say("journal", "resolve", *arguments).code == 2
    assert not (desk.state / "resolutions").exists()


def test_without_a_daemon_the_next_start_carries_it_out(desk: Desk) -> None:
    """With the daemon down, a decision is durable, and list and show print it."""
    desk.configure()
    identity = held(desk)
    said = desk.say("journal", "resolve", identity, "--forward", "--why", "it  is\nfine")
    assert said.code == 0
    assert said.lines[-1] == "No daemon is running: the next start carries it out."
    decided = resolutions.read_pending(desk.state, identity)
    assert decided is not None
    assert (decided.resolution, decided.why) == (Resolution.FORWARD, "it is fine")
    assert decided.who == resolve.login_name()
    file = desk.state / "resolutions" / f"{identity}.json"
    assert file.stat().st_mode & 0o777 == 0o600
    printed = desk.say("journal", "list").out
    assert "decided: forward" in printed
    assert "1 held" not in printed
    assert (
        "Decided, and not carried out yet: --forward" in desk.say("journal", "show", identity).out
    )


def test_a_second_decision_replaces_the_first(desk: Desk) -> None:
    """Repeating a decision is harmless; a different one replaces it, with a message."""
    desk.configure()
    identity = held(desk)
    for _ in range(2):
        said = desk.say("journal", "resolve", identity, "--forward", "--why", "x")
        assert said.code == 0
        assert "replaces" not in said.out
    said = desk.say("journal", "resolve", identity, "--abandon", "--why", "y")
    assert said.code == 0
    assert said.lines[0] == f"This replaces --forward, by {resolve.login_name()}: x"
    decided = resolutions.read_pending(desk.state, identity)
    assert decided is not None
    assert (decided.resolution, decided.why) == (Resolution.ABANDON, "y")
    assert len(list((desk.state / "resolutions").iterdir())) == 1


def test_only_a_held_operation_is_resolved(desk: Desk) -> None:
    """For an open operation that is not held, and a past one, resolve prints the state: 1."""
    desk.configure()
    opened, over = held(desk, hold=None), past(desk)
    for identity, state in (
        (opened, "(c/a) is not held, its state is open:"),
        (over, "(c/old) is not held, its state is done:"),
    ):
        said = desk.say("journal", "resolve", identity, "--abandon", "--why", "x")
        assert (said.code, said.out) == (1, "")
        assert state in said.err
    assert not (desk.state / "resolutions").exists()


UNDOES = """
class Undoer(NoPlan):
    async def undo(self, request, step):
        pass
"""


def test_back_needs_a_reconciler_that_can_undo(desk: Desk) -> None:
    """--back is refused with 1 unless the controller's reconciler can undo the operation."""
    desk.configure()
    identity = held(desk)
    back = ("journal", "resolve", identity, "--back", "--why", "x")
    said = desk.say(*back)
    assert said.code == 1
    assert "(c/a) cannot be undone: reconciler mine:Noter cannot undo this spec" in said.err
    desk.configure("  d: {reconciler: 'mine:Noter', watch: [{directory: m}]}\n")
    assert "controller c is not configured" in desk.say(*back).err
    plugin = desk.root / "plugins/mine.py"
    desk.write("plugins/undo.py", plugin.read_text() + UNDOES, mode=0o644)
    desk.configure("  c: {reconciler: 'undo:Undoer', watch: [{directory: m}]}\n")
    assert f"resolve {identity} --back" in desk.say("journal", "show", identity).out
    assert desk.say(*back).code == 0
    decided = resolutions.read_pending(desk.state, identity)
    assert decided is not None
    assert decided.resolution is Resolution.BACK


def test_a_decision_that_no_daemon_takes_is_withdrawn(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the holder of the state does not take a decision in time, it is withdrawn: 75."""
    desk.configure()
    identity = held(desk)
    monkeypatch.setattr(resolve, "WAIT", 0.2)
    lock = StateLock.acquire(desk.state)
    try:
        said = desk.say("journal", "resolve", identity, "--abandon", "--why", "x")
    finally:
        lock.release()
    assert (said.code, said.out) == (75, "")
    assert "the decision was withdrawn and nothing has changed" in said.err
    assert resolutions.resolution_files(desk.state).claim() == []


def test_a_claimed_decision_is_not_withdrawn(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that the daemon has claimed and not finished counts as made: 0."""
    desk.configure()
    identity = held(desk)
    monkeypatch.setattr(resolve, "WAIT", 0.2)
    monkeypatch.setattr(resolutions, "submit", submit_and_claim(resolutions.submit))
    lock = StateLock.acquire(desk.state)
    try:
        said = desk.say("journal", "resolve", identity, "--abandon", "--why", "x")
    finally:
        lock.release()
    assert said.code == 0
    assert said.lines[-1] == "The decision is durable, and not carried out yet."
    assert len(resolutions.resolution_files(desk.state).claim()) == 1


def submit_and_claim(submit: Callable[..., None]) -> Callable[..., None]:
    """As submit(), with a daemon that claims the decision at once."""

    def both(state: Path, decided: resolutions.ResolutionRequest) -> None:
        submit(state, decided)
        resolutions.resolution_files(state).claim()

    return both


@pytest.mark.parametrize("acts", [True, False])
def test_a_decision_is_made_only_if_the_journal_has_it(desk: Desk, *, acts: bool) -> None:
    """0 if the journal has exactly this decision afterwards; 1 if it came too late."""
    desk.configure()
    identity = held(desk)
    files = resolutions.resolution_files(desk.state)
    lock = StateLock.acquire(desk.state)

    async def act(operations: OperationJournal) -> None:
        (file,) = files.claim()
        decided = resolutions.read_resolution(files, file)
        who = decided.who if acts else "another person"
        await operations.resolve(identity, decided.resolution, who, decided.why)
        files.finish(file)

    def daemon() -> None:
        while not files.find(identity):
            pass
        in_journal(desk, act)

    simulated = threading.Thread(target=daemon, name="daemon")
    simulated.start()
    try:
        said = desk.say("journal", "resolve", identity, "--complete", "--why", "x")
    finally:
        simulated.join()
        lock.release()
    if acts:
        assert (said.code, said.err) == (0, "")
        assert (
            said.out
            == f"Decided: {identity} (c/a, upgrade) is recorded as done: nothing runs for it.\n"
        )
    else:
        assert (said.code, said.out) == (1, "")
        assert "the operation was not held any" in said.err


def test_all_is_for_a_damaged_store(desk: Desk) -> None:
    """--all is refused with 1 unless the store was damaged."""
    desk.configure()
    held(desk)
    everything = ("journal", "resolve", "--all", "--abandon", "--why", "looked")
    said = desk.say(*everything)
    assert said.code == 1
    assert "--all is only for a damaged store" in said.err

    degraded(desk)
    assert "The store was damaged: lost" in desk.say("journal", "list").err
    said = desk.say(*everything)
    assert said.code == 0
    assert (
        said.lines[0] == "Decided: the store is trusted again, and 1 held operations are abandoned."
    )
    decided = resolutions.read_pending(desk.state, resolutions.ALL_OPERATIONS)
    assert decided is not None
    assert decided.why == "looked"


def test_the_login_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has the login that called sudo; SUDO_UID counts for root only."""
    monkeypatch.setenv("SUDO_USER", "eve")
    monkeypatch.setenv("SUDO_UID", "4711")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert resolve.login_name() == "eve (uid 4711, sudo)"
    monkeypatch.setattr(os, "getuid", lambda: 4712)
    assert resolve.login_name() == "unknown (uid 4712)"


def test_a_probe_neither_locks_nor_creates(desk: Desk) -> None:
    """A probe detects a holder, creates nothing, and leaves the lock free."""
    desk.configure()
    probe(desk.state)
    assert not desk.state.exists()
    StateLock.acquire(desk.state).release()
    probe(desk.state)
    lock = StateLock.acquire(desk.state, wait=0)
    with pytest.raises(StateLocked):
        probe(desk.state)
    lock.release()


@pytest.mark.processes
def test_a_real_daemon_carries_it_out(desk: Desk) -> None:
    """A running daemon carries a decision out within seconds, and resolve waits for it."""
    desk.configure()
    identity = held(desk)
    code = "import sys; from reconciled.cli import main; sys.exit(main(sys.argv[1:]))"
    program = [sys.executable, "-c", code, "--config", str(desk.root / "r.yaml"), "run"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr is not None
        for line in daemon.stderr:
            if "daemon.ready" in line:
                break
        began = time.monotonic()
        said = desk.say("journal", "resolve", identity, "--complete", "--why", "x")
        took = time.monotonic() - began
        daemon.terminate()
        rest = daemon.stderr.read()
    assert (said.code, said.err) == (0, "")
    assert took < resolve.WAIT
    assert "operation.resolved" in rest
    assert daemon.returncode == 0
    assert desk.say("journal", "show", identity).lines[0] == f"{identity}: completed"
