"""Rules of the exec reconciler, with real programs and a request without a daemon."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from reconciled.api import (
    Abandon,
    Change,
    Complete,
    Decision,
    Hold,
    Interrupted,
    Observation,
    Observed,
    Outcome,
    ProgramEnd,
    ProgramFailed,
    Request,
    Retry,
    RollBack,
    RollForward,
    Secret,
    Step,
    StepKind,
    Wait,
)
from reconciled.config.structuring.structurer import Structurer
from reconciled.config.yaml.positions import Location, Positions
from reconciled.core.durations import Seconds
from reconciled.core.errors import Invalid
from reconciled.reconcilers.exec.reconciler import CriticalPart, Exec, ExecReconciler

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeOperation, FakeRequest

pytestmark = pytest.mark.processes


def script(directory: Path, name: str, text: str) -> list[str]:
    """Write a program ./NAME that records each of its runs."""
    file = directory / name
    file.write_text(f"#!/bin/sh\necho {name} >> runs\n{text}\n")
    file.chmod(0o755)
    return [f"./{name}"]


def runs(directory: Path) -> list[str]:
    file = directory / "runs"
    return file.read_text().split() if file.exists() else []


def ask(directory: Path, spec: Exec, **fields: Any) -> tuple[FakeRequest[Exec], Request[Exec]]:
    """One request twice: as a fake, and typed as the reconciler's argument."""
    fake = FakeRequest(spec, base=directory, state=directory / "state", **fields)
    request: Any = fake
    return fake, request


# -- reconcile -------------------------------------------------------------


async def test_as_desired(tmp_path: Path) -> None:
    """If check exits with 0, no other program runs and no operation is opened."""
    spec = Exec(
        check=script(tmp_path, "check", "exit 0"), apply=script(tmp_path, "apply", "exit 0")
    )
    fake, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert (result.outcome, result.reason) == (Outcome.DONE, "")
    assert runs(tmp_path) == ["check"]
    assert fake.operations == []
    assert (fake.output / "check.log").exists()


async def test_check_apply_check(tmp_path: Path) -> None:
    """If check exits with 1, apply runs as an operation, and a second check decides."""
    spec = Exec(
        check=script(tmp_path, "check", "test -e done || exit 1"),
        apply=script(tmp_path, "apply", "touch done"),
    )
    fake, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert (result.outcome, result.reason) == (Outcome.DONE, "applied")
    assert runs(tmp_path) == ["check", "apply", "check"]
    assert [(o.name, o.ended, o.budgets) for o in fake.operations] == [("apply", "done", [])]
    assert (fake.operations[0].directory / "apply.log").exists()


async def test_still_not_as_desired(tmp_path: Path) -> None:
    """If check still exits with 1 after apply, the run failed, and its reason quotes check."""
    spec = Exec(
        check=script(tmp_path, "check", "echo not yet; exit 1"),
        apply=script(tmp_path, "apply", ""),
    )
    fake, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.RETRY
    assert result.reason == (
        "still not as desired after apply: ./check ended with exit code 1: not yet"
    )
    assert fake.operations[0].ended == "done"


async def test_no_second_check_in_a_stop(tmp_path: Path) -> None:
    """During a stop the second check is skipped."""
    spec = Exec(
        check=script(tmp_path, "check", "exit 1"), apply=script(tmp_path, "apply", "exit 0")
    )
    _, request = ask(tmp_path, spec, stopping=True)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.DONE
    assert runs(tmp_path) == ["check", "apply"]


@pytest.mark.parametrize("code", [2, 7, 126])
async def test_check_fails(tmp_path: Path, code: int) -> None:
    """Any other exit code of check is a failed run, and apply does not run."""
    spec = Exec(
        check=script(tmp_path, "check", f"echo why >&2; exit {code}"),
        apply=script(tmp_path, "apply", ""),
    )
    fake, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.RETRY
    assert result.reason == f"./check ended with exit code {code}: why"
    assert fake.operations == []


async def test_killed_check_is_not_a_result(tmp_path: Path) -> None:
    """A check that a signal ended is neither 0 nor 1: the failure is raised."""
    spec = Exec(check=script(tmp_path, "check", "kill -9 $$"), apply=script(tmp_path, "apply", ""))
    _, request = ask(tmp_path, spec)
    with pytest.raises(ProgramFailed, match="check was ended by SIGKILL"):
        await ExecReconciler().reconcile(request)
    assert runs(tmp_path) == ["check"]


@pytest.mark.parametrize("action", ["reconcile", "remove"])
async def test_killed_program_has_no_outcome(tmp_path: Path, action: str) -> None:
    """A program that was killed, for example for memory, is interrupted: the failure is raised."""
    killed = script(tmp_path, "killed", "kill -9 $$")
    _, request = ask(tmp_path, Exec(apply=killed, remove=killed))
    with pytest.raises(ProgramFailed, match="killed was ended by SIGKILL"):
        await getattr(ExecReconciler(), action)(request)


async def test_apply_fails(tmp_path: Path) -> None:
    """A failed apply is a failed operation, and a retry that quotes its last lines."""
    spec = Exec(apply=script(tmp_path, "apply", "echo no space left; exit 4"))
    fake, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.RETRY
    assert result.reason == "./apply ended with exit code 4: no space left"
    assert (fake.operations[0].ended, fake.operations[0].steps) == ("failed", {})


@pytest.mark.parametrize(
    ("applied", "expected"), [(None, ["apply"]), ("old", ["apply"]), ("new", [])]
)
async def test_without_check(tmp_path: Path, applied: str | None, expected: list[str]) -> None:
    """Without check, apply runs if the spec differs from the last applied one."""
    spec = Exec(apply=script(tmp_path, "apply", ""))
    _, request = ask(tmp_path, spec, applied=applied)
    assert (await ExecReconciler().reconcile(request)).outcome is Outcome.DONE
    assert runs(tmp_path) == expected


async def test_missing_program(tmp_path: Path) -> None:
    """A missing program is a retry with a reason, since it may be installed later."""
    _, request = ask(tmp_path, Exec(apply=["./absent"]))
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.RETRY
    assert result.reason.startswith(f"cannot start ./absent: {tmp_path}/absent does not exist")


# -- the input of a program ------------------------------------------------


async def test_program_gets_spec_and_identity(tmp_path: Path) -> None:
    """A program of an operation gets the spec on standard input, and the operation's identity."""
    spec = Exec(
        apply=script(tmp_path, "apply", "cat > spec; env | grep -e ^RECONCILED -e ^MINE > env"),
        environment={"MINE": "yes"},
    )
    fake, request = ask(tmp_path, spec, raw_spec={"apply": ["./apply"], "text": "ä"})
    fake.interrupted = FakeOperation("apply", tmp_path / "op", "op-9", attempt=3, last_step="half")
    await ExecReconciler().reconcile(request)
    assert json.loads((tmp_path / "spec").read_bytes()) == fake.raw_spec
    assert sorted((tmp_path / "env").read_text().splitlines()) == [
        "MINE=yes",
        "RECONCILED_ACTION=apply",
        "RECONCILED_ATTEMPT=3",
        "RECONCILED_EPOCH=7",
        f"RECONCILED_HANDLE=3:{tmp_path / 'op'}",
        "RECONCILED_KEY=site/x",
        "RECONCILED_OPERATION=op-9",
        "RECONCILED_STEP=half",
    ]


async def test_check_gets_no_operation(tmp_path: Path) -> None:
    """Outside an operation a program gets only the key and the action."""
    spec = Exec(check=script(tmp_path, "check", "env | grep ^RECONCILED > env"), apply=["true"])
    _, request = ask(tmp_path, spec)
    await ExecReconciler().reconcile(request)
    environment = sorted((tmp_path / "env").read_text().splitlines())
    assert environment == ["RECONCILED_ACTION=check", "RECONCILED_KEY=site/x"]


async def test_directory(tmp_path: Path) -> None:
    """The directory is relative to the manifest, and argument 0 to the directory."""
    (tmp_path / "sub").mkdir()
    spec = Exec(apply=script(tmp_path / "sub", "apply", "pwd > where"), directory="sub")
    _, request = ask(tmp_path, spec)
    assert (await ExecReconciler().reconcile(request)).outcome is Outcome.DONE
    assert (tmp_path / "sub" / "where").read_text() == f"{tmp_path / 'sub'}\n"


# -- critical --------------------------------------------------------------


async def test_critical_outlives_cancellation(tmp_path: Path) -> None:
    """A critical apply runs to its end in spite of a cancellation, and its outcome is kept."""
    spec = Exec(
        apply=script(tmp_path, "apply", "touch started; sleep 0.5; touch done"),
        critical=CriticalPart(Seconds(10)),
    )
    fake, request = ask(tmp_path, spec)
    await _cancel_when_started(tmp_path, request)
    assert (tmp_path / "done").exists()
    assert fake.operations[0].budgets == [10]
    assert fake.operations[0].last_step == "apply"
    assert fake.operations[0].ended == "done"


async def test_ordinary_apply_is_cut(tmp_path: Path) -> None:
    """Without critical a cancellation ends apply, and no step is recorded."""
    spec = Exec(apply=script(tmp_path, "apply", "touch started; sleep 99; touch done"))
    fake, request = ask(tmp_path, spec)
    await _cancel_when_started(tmp_path, request)
    assert not (tmp_path / "done").exists()
    assert (fake.operations[0].ended, fake.operations[0].steps) == ("interrupted", {})


async def _cancel_when_started(directory: Path, request: Request[Exec]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ExecReconciler().reconcile, request)
        with trio.fail_after(10):
            while not (directory / "started").exists():  # noqa: ASYNC110 no event from a program
                await trio.sleep(0.005)
        nursery.cancel_scope.cancel(reason="the test")


async def test_finished_step_is_not_repeated(tmp_path: Path) -> None:
    """An operation that is entered again does not repeat an apply whose end is durable."""
    spec = Exec(apply=script(tmp_path, "apply", ""))
    fake, request = ask(tmp_path, spec)
    done = {"apply": {"duration": 1.0}}
    fake.interrupted = FakeOperation("apply", tmp_path / "op", attempt=2, steps=done)
    assert (await ExecReconciler().reconcile(request)).outcome is Outcome.DONE
    assert runs(tmp_path) == []
    assert fake.operations[0].ended == "done"


# -- remove and plan -------------------------------------------------------


async def test_remove(tmp_path: Path) -> None:
    """Remove runs as a separate operation, critical like apply; its failure is a retry."""
    spec = Exec(
        apply=["true"],
        remove=script(tmp_path, "remove", 'test "$RECONCILED_ACTION" = remove && test -e ok'),
        critical=CriticalPart(Seconds(5)),
    )
    fake, request = ask(tmp_path, spec)
    assert (await ExecReconciler().remove(request)).outcome is Outcome.RETRY
    (tmp_path / "ok").touch()
    assert (await ExecReconciler().remove(request)).outcome is Outcome.DONE
    assert [(o.name, o.ended, o.budgets) for o in fake.operations] == [
        ("remove", "failed", [5]),
        ("remove", "done", [5]),
    ]


async def test_without_remove(tmp_path: Path) -> None:
    """Without remove no program runs and no operation is opened."""
    fake, request = ask(tmp_path, Exec(apply=["true"]))
    assert (await ExecReconciler().remove(request)).outcome is Outcome.DONE
    assert fake.operations == []


async def test_plan(tmp_path: Path) -> None:
    """A plan runs check alone and shows its output; a failing check is an error."""
    spec = Exec(
        check=script(tmp_path, "check", "echo 2 differ; exit $(cat code)"),
        apply=script(tmp_path, "apply", ""),
    )
    _, request = ask(tmp_path, spec)
    (tmp_path / "code").write_text("1")
    assert await ExecReconciler().plan(request) == [Change("run", "./apply", "2 differ")]
    (tmp_path / "code").write_text("0")
    assert await ExecReconciler().plan(request) == []
    (tmp_path / "code").write_text("9")
    with pytest.raises(ProgramFailed, match="exit code 9"):
        await ExecReconciler().plan(request)
    assert runs(tmp_path) == ["check"] * 3


async def test_plan_without_check(tmp_path: Path) -> None:
    """Without check a plan compares the spec with the last applied one and runs no program."""
    spec = Exec(apply=script(tmp_path, "apply", ""))
    _, request = ask(tmp_path, spec, applied="old")
    [change] = await ExecReconciler().plan(request)
    assert (change.action, change.what) == ("run", "./apply")
    _, request = ask(tmp_path, spec, applied="new")
    assert await ExecReconciler().plan(request) == []
    assert runs(tmp_path) == []


# -- after an interruption --------------------------------------------------


@attrs.frozen
class FakeRecovering:
    """The interrupted operation in the request of its recovery."""

    name: str
    directory: Path
    id: str = "op-9"
    attempt: int = 1
    epoch: int = 7
    last_step: str = ""
    undoes: str = ""
    ended: ProgramEnd | None = None


@attrs.define(eq=False)
class UndoingOperation(FakeOperation):
    """An operation that undoes another one."""

    undoes: str = "op-9"


def interrupted(spec: Exec, **fields: Any) -> Interrupted:
    """The interrupted operation as the argument of recover()."""
    given = {"id": "op-9", "key": "site/x", "name": "apply", "attempt": 2, **fields}
    return Interrupted(spec=spec, **given)


async def decide(request: Request[Exec], **fields: Any) -> tuple[Observation, Decision | None]:
    """Observe, and decide on the observation."""
    reconciler = ExecReconciler()
    seen = await reconciler.observe(request)
    return seen, reconciler.recover(interrupted(request.spec, **fields), seen)


@pytest.mark.parametrize(
    ("check", "state"),
    [
        ("exit 0", Observed.AS_DESIRED),
        ("exit 1", Observed.DIFFERENT),
        ("exit 2", Observed.UNKNOWN),
        ("kill -9 $$", Observed.UNKNOWN),
    ],
)
async def test_observe(tmp_path: Path, check: str, state: Observed) -> None:
    """Exit codes 0 and 1 of check are observations; everything else is UNKNOWN."""
    fake, request = ask(tmp_path, Exec(["true"], check=script(tmp_path, "check", check)))
    seen = await ExecReconciler().observe(request)
    assert seen is not None
    assert (seen.state, seen.data) == (state, None)
    assert fake.operations == []


async def test_without_a_check_nothing_can_be_observed(tmp_path: Path) -> None:
    """Without a check there is no observation, so that the controller's policy decides."""
    _, request = ask(tmp_path, Exec(["true"]))
    assert await ExecReconciler().observe(request) is None


@pytest.mark.parametrize(
    ("check", "observed"),
    [("exit 0", "0"), ("exit 1", "1"), ("exit 9", "unknown"), (None, "unknown")],
)
async def test_recover_gets_the_observation(
    tmp_path: Path, check: str | None, observed: str
) -> None:
    """The program recover always runs in the operation and gets the result of check."""
    env = "env | grep -e ^RECONCILED > env; cat > spec"
    spec = Exec(
        ["true"],
        check=None if check is None else script(tmp_path, "check", check),
        recover=script(tmp_path, "recover", env),
    )
    left = FakeRecovering(
        "apply", tmp_path / "operations" / "op-9", "op-9", attempt=2, last_step="half"
    )
    _, request = ask(tmp_path, spec, interrupted=left, raw_spec={"apply": ["true"]})
    _, decision = await decide(request)
    assert isinstance(decision, Complete)
    assert json.loads((tmp_path / "spec").read_bytes()) == {"apply": ["true"]}
    assert sorted((tmp_path / "env").read_text().splitlines()) == [
        "RECONCILED_ACTION=apply",
        "RECONCILED_ATTEMPT=2",
        "RECONCILED_EPOCH=7",
        f"RECONCILED_HANDLE=2:{left.directory}",
        "RECONCILED_KEY=site/x",
        f"RECONCILED_OBSERVED={observed}",
        "RECONCILED_OPERATION=op-9",
        "RECONCILED_STEP=half",
    ]
    assert json.loads((left.directory / "child").read_bytes())["action"] == "recover"


RESULT = "./recover ended with exit code {}: because"


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        (0, {}, Complete(RESULT.format(0))),
        (10, {}, Retry(RESULT.format(10))),
        (
            10,
            {"steps": (Step("apply", StepKind.ONCE, done=False),)},
            RollForward(RESULT.format(10)),
        ),
        (10, {"undoes": "op-8"}, RollForward(RESULT.format(10))),
        (11, {}, RollBack(RESULT.format(11))),
        (11, {"undoes": "op-8"}, RollForward(RESULT.format(11))),
        (12, {}, Hold("recover requested a hold", RESULT.format(12))),
        (1, {"attempt": 2}, Wait(2, RESULT.format(1))),
        (13, {"attempt": 6}, Wait(32, RESULT.format(13))),
        (13, {"attempt": 60}, Wait(300, RESULT.format(13))),
    ],
)
async def test_recover_decides(
    tmp_path: Path, code: int, fields: dict[str, Any], expected: Decision
) -> None:
    """Each exit code of recover is one decision; after any other it runs again later."""
    spec = Exec(["true"], recover=script(tmp_path, "recover", f"echo because; exit {code}"))
    left = FakeRecovering("apply", tmp_path / "op-9", undoes=fields.get("undoes", ""))
    _, request = ask(tmp_path, spec, interrupted=left)
    _, decision = await decide(request, **fields)
    assert decision == expected


async def test_recover_that_cannot_start(tmp_path: Path) -> None:
    """A missing recover has no result and is run again later."""
    left = FakeRecovering("apply", tmp_path / "op-9")
    _, request = ask(tmp_path, Exec(["true"], recover=["./missing"]), interrupted=left)
    _, decision = await decide(request)
    assert isinstance(decision, Wait)
    assert decision.reason.startswith(f"cannot start ./missing: {tmp_path}/missing does not exist")


async def test_c02_recover_that_is_killed(tmp_path: Path) -> None:
    """C02: a recover ended by a signal has no result: UNKNOWN, and no decision."""
    spec = Exec(
        ["true"],
        check=script(tmp_path, "check", "exit 1"),
        recover=script(tmp_path, "recover", "kill -9 $$"),
    )
    _, request = ask(tmp_path, spec, interrupted=FakeRecovering("apply", tmp_path / "op-9"))
    seen, decision = await decide(request)
    assert (seen.state, decision) == (Observed.UNKNOWN, None)
    assert isinstance(ExecReconciler().recover(interrupted(spec, undoes="op-8"), seen), Wait)
    assert isinstance(ExecReconciler().recover(interrupted(spec, removal=True), seen), Wait)


async def test_surviving_program_that_succeeded(tmp_path: Path) -> None:
    """Exit code 0 of a program that outlived its daemon completes it; recover does not run."""
    ended = ProgramEnd("apply", 0)
    spec = Exec(["true"], recover=script(tmp_path, "recover", "exit 12"))
    left = FakeRecovering("apply", tmp_path / "op-9", ended=ended)
    _, request = ask(tmp_path, spec, interrupted=left)
    _, decision = await decide(request, ended=ended)
    assert decision == Complete("apply ended with exit code 0 after its daemon had ended")
    assert runs(tmp_path) == []


ONCE = (Step("apply", StepKind.ONCE, done=False),)
HALF = (Step("half", StepKind.IDEMPOTENT, done=True),)


@pytest.mark.parametrize(
    ("ended", "fields", "expected"),
    [
        (ProgramEnd("apply", 4), {}, Abandon("apply ended with exit code 4")),
        (ProgramEnd("remove", 4), {"name": "remove"}, Abandon("remove ended with exit code 4")),
        (ProgramEnd("apply", 4), {"steps": ONCE}, None),
        (ProgramEnd("apply", 4), {"steps": HALF}, None),
        (ProgramEnd("apply", None, 9), {}, None),
        (ProgramEnd("recover", 0), {}, None),
        (None, {}, None),
    ],
)
def test_surviving_program_that_did_not_succeed(
    ended: ProgramEnd | None, fields: dict[str, Any], expected: Decision | None
) -> None:
    """Another exit code is a failure; a signal, another program or no record decides nothing."""
    spec = Exec(["true"])
    seen = Observation(Observed.DIFFERENT)
    facts = interrupted(spec, ended=ended, **fields)
    assert ExecReconciler().recover(facts, seen) == expected


async def test_once(tmp_path: Path) -> None:
    """With once, apply is a ONCE step; otherwise it is idempotent."""
    for once, kind in ((True, StepKind.ONCE), (False, StepKind.IDEMPOTENT)):
        fake, request = ask(tmp_path, Exec(["true"], once=once))
        fake.interrupted = Kinds("apply", tmp_path / "op")
        await ExecReconciler().reconcile(request)
        assert fake.operations[0].steps == {"apply": kind.value}


class Kinds(FakeOperation):
    """An operation that records the kinds of its steps."""

    async def step(
        self,
        name: str,
        function: Callable[[], Awaitable[Any]],
        *,
        kind: StepKind = StepKind.IDEMPOTENT,
    ) -> Any:
        self.steps[name] = kind.value
        return await function()


async def test_rollback(tmp_path: Path) -> None:
    """Rollback runs in the undoing operation, critical like apply, and gets the undone id."""
    spec = Exec(
        ["true"],
        rollback=script(tmp_path, "rollback", "env | grep ^RECONCILED > env"),
        critical=CriticalPart(Seconds(5)),
    )
    undoing = UndoingOperation("rollback", tmp_path / "op-10", "op-10")
    fake, request = ask(tmp_path, spec, interrupted=undoing)
    await ExecReconciler().undo(request, Step("apply", StepKind.IDEMPOTENT, done=True))
    environment = (tmp_path / "env").read_text().splitlines()
    for line in ("ACTION=rollback", "UNDOES=op-9", "OPERATION=op-10"):
        assert f"RECONCILED_{line}" in environment
    assert fake.operations[0].budgets == [5]


async def test_rollback_fails(tmp_path: Path) -> None:
    """A failed rollback is an error; without one the operation cannot be undone."""
    spec = Exec(["true"], rollback=script(tmp_path, "rollback", "exit 3"))
    _, request = ask(tmp_path, spec)
    step = Step("apply", StepKind.IDEMPOTENT, done=True)
    with pytest.raises(ProgramFailed, match="exit code 3"):
        await ExecReconciler().undo(request, step)
    assert ExecReconciler().can_undo(spec)
    assert not ExecReconciler().can_undo(Exec(["true"]))


# -- the spec --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"apply": []}, "apply names no program: write its name and arguments as a list"),
        ({"check": [""]}, "check names no program"),
        ({"remove": ["a\0b"]}, "remove has a NUL character"),
        ({"environment": {"RECONCILED_KEY": "x"}}, "environment must not set RECONCILED_KEY: "),
        ({"environment": {"A=B": "x"}}, "environment cannot set 'A=B'"),
    ],
)
def test_spec_is_refused(fields: dict[str, Any], message: str) -> None:
    """An invalid spec is refused when it is read, with the correct form."""
    with pytest.raises(ValueError, match=message):
        Exec(**{"apply": ["true"], **fields})


@pytest.mark.parametrize("budget", ["0s", "5", "soon", "", 5])
def test_budget_is_refused(budget: object) -> None:
    """A budget is a positive duration with a unit."""
    with pytest.raises(Invalid, match=r"budget must be longer|is not a duration|duration"):
        Structurer().structure(CriticalPart, {"budget": budget}, Positions("f", Location(1, 1)))


def test_kind() -> None:
    """The kind is Exec."""
    assert ExecReconciler.kind == "Exec"


# -- secrets -----------------------------------------------------------------


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A credentials directory that holds api-token."""
    directory = tmp_path / "credentials"
    directory.mkdir()
    (directory / "api-token").write_text("tok-Q7x9\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(directory))
    return directory


WITH_SECRET: dict[str, str | Secret] = {"TOKEN": Secret("api-token"), "PLAIN": "text"}


@pytest.mark.usefixtures("credentials")
async def test_program_gets_the_secret(tmp_path: Path) -> None:
    """A secret in ``environment`` is a variable of each program, without the final newline."""
    record = 'printf "%s|" "$TOKEN" "$PLAIN" >> seen'
    spec = Exec(
        check=script(tmp_path, "check", f"{record}\ntest -e done || exit 1"),
        apply=script(tmp_path, "apply", f"{record}\ncat > done\nenv > environment"),
        environment=WITH_SECRET,
    )
    raw = {"environment": {"TOKEN": {"credential": "api-token"}}}
    _, request = ask(tmp_path, spec, raw_spec=raw)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.DONE
    assert (tmp_path / "seen").read_text() == "tok-Q7x9|text|" * 3
    # Standard input holds the reference, as everywhere else.
    assert json.loads((tmp_path / "done").read_text()) == raw
    assert "CREDENTIALS_DIRECTORY" not in (tmp_path / "environment").read_text()


async def test_secret_is_read_at_each_start(tmp_path: Path, credentials: Path) -> None:
    """A secret is read at each start of a program, not when the manifest is read."""
    spec = Exec(apply=script(tmp_path, "apply", 'echo "$TOKEN" >> seen'), environment=WITH_SECRET)
    for token in ("first", "second"):
        (credentials / "api-token").write_text(token)
        _, request = ask(tmp_path, spec)
        await ExecReconciler().reconcile(request)
    assert (tmp_path / "seen").read_text() == "first\nsecond\n"


@pytest.mark.usefixtures("credentials")
async def test_no_file_holds_the_secret(tmp_path: Path) -> None:
    """While a program of an operation runs, no file of the state directory has its secret."""
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    spec = Exec(apply=script(tmp_path, "apply", "read _ < go"), environment=WITH_SECRET)
    fake, request = ask(tmp_path, spec)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ExecReconciler().reconcile, request)
        # open() returns when the program has opened the fifo, so it runs.
        writer = await trio.to_thread.run_sync(os.open, fifo, os.O_WRONLY)
        files = [path for path in fake.state.rglob("*") if path.is_file()]
        assert fake.operations[0].directory / "child" in files
        assert not [path for path in files if b"tok-Q7x9" in path.read_bytes()]
        os.close(writer)


@pytest.mark.parametrize("once", [False, True])
async def test_missing_secret_is_a_failed_run(
    tmp_path: Path, credentials: Path, *, once: bool
) -> None:
    """A run with a missing secret fails before its operation, and the reason names the remedy."""
    (credentials / "api-token").unlink()
    spec = Exec(apply=script(tmp_path, "apply", ""), environment=WITH_SECRET, once=once)
    fake, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.RETRY
    assert result.reason.startswith("cannot set TOKEN in environment: credential api-token")
    assert "LoadCredential=api-token:" in result.reason
    assert (runs(tmp_path), fake.operations) == ([], [])


async def test_observation_is_unknown_without_the_secret(tmp_path: Path, credentials: Path) -> None:
    """If the secret of check is missing, the observation is UNKNOWN."""
    (credentials / "api-token").unlink()
    spec = Exec(
        check=script(tmp_path, "check", ""),
        apply=["x"],
        recover=script(tmp_path, "recover", ""),
        rollback=["x"],
        environment=WITH_SECRET,
    )
    _, request = ask(tmp_path, spec)
    seen = await ExecReconciler().observe(request)
    assert seen is not None
    assert (seen.state, runs(tmp_path)) == (Observed.UNKNOWN, [])
    with pytest.raises(ProgramFailed, match="cannot set TOKEN in environment"):
        await ExecReconciler().plan(request)
    with pytest.raises(ProgramFailed, match="cannot set TOKEN in environment"):
        await ExecReconciler().undo(request, Step("apply", StepKind.IDEMPOTENT, done=True))


async def test_secret_with_nul_is_refused(tmp_path: Path, credentials: Path) -> None:
    """A secret that contains NUL is refused by name and not shown."""
    (credentials / "api-token").write_bytes(b"tok\0Q7x9")
    spec = Exec(apply=script(tmp_path, "apply", ""), environment=WITH_SECRET)
    _, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert result.reason == "cannot set TOKEN in environment: its secret contains NUL"
