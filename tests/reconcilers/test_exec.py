"""Rules of the exec reconciler, with real programs and a request without a host."""

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
    """A program called ./name, that notes each of its runs."""
    file = directory / name
    file.write_text(f"#!/bin/sh\necho {name} >> runs\n{text}\n")
    file.chmod(0o755)
    return [f"./{name}"]


def runs(directory: Path) -> list[str]:
    file = directory / "runs"
    return file.read_text().split() if file.exists() else []


def ask(directory: Path, spec: Exec, **fields: Any) -> tuple[FakeRequest[Exec], Request[Exec]]:
    """The same request twice: as what it is, and as what the reconciler takes it for."""
    fake = FakeRequest(spec, base=directory, state=directory / "state", **fields)
    request: Any = fake
    return fake, request


# -- reconcile -------------------------------------------------------------


async def test_as_desired(tmp_path: Path) -> None:
    """When check says 0 nothing else runs, and no operation is opened."""
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
    """When check says 1, apply runs as an operation, and check has the last word."""
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
    """An apply that ended well and changed nothing is a failed run, with check's last words."""
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
    """During a stop the second check is left to the next start."""
    spec = Exec(
        check=script(tmp_path, "check", "exit 1"), apply=script(tmp_path, "apply", "exit 0")
    )
    _, request = ask(tmp_path, spec, stopping=True)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.DONE
    assert runs(tmp_path) == ["check", "apply"]


@pytest.mark.parametrize("code", [2, 7, 126])
async def test_check_fails(tmp_path: Path, code: int) -> None:
    """Any other exit code of check is a failure, and nothing is applied on a guess."""
    spec = Exec(
        check=script(tmp_path, "check", f"echo why >&2; exit {code}"),
        apply=script(tmp_path, "apply", ""),
    )
    fake, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.RETRY
    assert result.reason == f"./check ended with exit code {code}: why"
    assert fake.operations == []


async def test_killed_check_is_no_answer(tmp_path: Path) -> None:
    """A check that a signal ended answers neither yes nor no: not a word of its own."""
    spec = Exec(check=script(tmp_path, "check", "kill -9 $$"), apply=script(tmp_path, "apply", ""))
    _, request = ask(tmp_path, spec)
    with pytest.raises(ProgramFailed, match="check was ended by SIGKILL"):
        await ExecReconciler().reconcile(request)
    assert runs(tmp_path) == ["check"]


@pytest.mark.parametrize("action", ["reconcile", "remove"])
async def test_a_killed_program_has_said_nothing(tmp_path: Path, action: str) -> None:
    """A program that was killed, for memory say, is interrupted: no answer stands for its own."""
    killed = script(tmp_path, "killed", "kill -9 $$")
    _, request = ask(tmp_path, Exec(apply=killed, remove=killed))
    with pytest.raises(ProgramFailed, match="killed was ended by SIGKILL"):
        await getattr(ExecReconciler(), action)(request)


async def test_apply_fails(tmp_path: Path) -> None:
    """A failed apply is a failed operation and a retry that quotes its last lines."""
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
    """Without check, apply runs when the spec is not the one last applied."""
    spec = Exec(apply=script(tmp_path, "apply", ""))
    _, request = ask(tmp_path, spec, applied=applied)
    assert (await ExecReconciler().reconcile(request)).outcome is Outcome.DONE
    assert runs(tmp_path) == expected


async def test_missing_program(tmp_path: Path) -> None:
    """A program that is not there is a retry with a reason: it may come."""
    _, request = ask(tmp_path, Exec(apply=["./absent"]))
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.RETRY
    assert result.reason.startswith("./absent cannot be started: there is no ")


# -- what a program is told ------------------------------------------------


async def test_told(tmp_path: Path) -> None:
    """A program in an operation gets its spec on standard input, and its identity."""
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


async def test_check_is_told_no_operation(tmp_path: Path) -> None:
    """Outside an operation a program is told the key and the action, and nothing made up."""
    spec = Exec(check=script(tmp_path, "check", "env | grep ^RECONCILED > env"), apply=["true"])
    _, request = ask(tmp_path, spec)
    await ExecReconciler().reconcile(request)
    told = sorted((tmp_path / "env").read_text().splitlines())
    assert told == ["RECONCILED_ACTION=check", "RECONCILED_KEY=site/x"]


async def test_directory(tmp_path: Path) -> None:
    """The directory is relative to the manifest, and argument 0 to the directory."""
    (tmp_path / "sub").mkdir()
    spec = Exec(apply=script(tmp_path / "sub", "apply", "pwd > where"), directory="sub")
    _, request = ask(tmp_path, spec)
    assert (await ExecReconciler().reconcile(request)).outcome is Outcome.DONE
    assert (tmp_path / "sub" / "where").read_text() == f"{tmp_path / 'sub'}\n"


# -- critical --------------------------------------------------------------


async def test_critical_outlives_cancellation(tmp_path: Path) -> None:
    """A critical apply runs to its end, and its outcome is kept."""
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
    """Without critical a cancellation cuts apply, and leaves no step behind."""
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
    """An operation that is entered again does not run an apply whose end is durable."""
    spec = Exec(apply=script(tmp_path, "apply", ""))
    fake, request = ask(tmp_path, spec)
    done = {"apply": {"duration": 1.0}}
    fake.interrupted = FakeOperation("apply", tmp_path / "op", attempt=2, steps=done)
    assert (await ExecReconciler().reconcile(request)).outcome is Outcome.DONE
    assert runs(tmp_path) == []
    assert fake.operations[0].ended == "done"


# -- remove and plan -------------------------------------------------------


async def test_remove(tmp_path: Path) -> None:
    """Removal runs as an operation of its own, critical as apply is; its failure is a retry."""
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
    """Without remove a key is only forgotten: nothing runs, no operation is opened."""
    fake, request = ask(tmp_path, Exec(apply=["true"]))
    assert (await ExecReconciler().remove(request)).outcome is Outcome.DONE
    assert fake.operations == []


async def test_plan(tmp_path: Path) -> None:
    """A plan runs check alone, and shows what check wrote; a failing check is no plan."""
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
    """Without check a plan compares the spec with the one last applied, and runs nothing."""
    spec = Exec(apply=script(tmp_path, "apply", ""))
    _, request = ask(tmp_path, spec, applied="old")
    [change] = await ExecReconciler().plan(request)
    assert (change.action, change.what) == ("run", "./apply")
    _, request = ask(tmp_path, spec, applied="new")
    assert await ExecReconciler().plan(request) == []
    assert runs(tmp_path) == []


# -- after an interruption --------------------------------------------------


@attrs.frozen
class Left:
    """The interrupted operation, as the request of its recovery names it."""

    name: str
    directory: Path
    id: str = "op-9"
    attempt: int = 1
    epoch: int = 7
    last_step: str = ""
    undoes: str = ""
    ended: ProgramEnd | None = None


@attrs.define(eq=False)
class Undoing(FakeOperation):
    """An operation that takes another one back."""

    undoes: str = "op-9"


def interrupted(spec: Exec, **fields: Any) -> Interrupted:
    """The same as recover() sees it."""
    given = {"id": "op-9", "key": "site/x", "name": "apply", "attempt": 2, **fields}
    return Interrupted(spec=spec, **given)


async def decide(request: Request[Exec], **fields: Any) -> tuple[Observation, Decision | None]:
    """Observe, and decide on what was seen."""
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
    """What is there is what check says: 0 and 1 are answers, everything else is unknown."""
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
    ("check", "told"), [("exit 0", "0"), ("exit 1", "1"), ("exit 9", "unknown"), (None, "unknown")]
)
async def test_recover_is_told(tmp_path: Path, check: str | None, told: str) -> None:
    """The program recover is always asked, by the operation, and told what was observed."""
    env = "env | grep -e ^RECONCILED > env; cat > spec"
    spec = Exec(
        ["true"],
        check=None if check is None else script(tmp_path, "check", check),
        recover=script(tmp_path, "recover", env),
    )
    left = Left("apply", tmp_path / "operations" / "op-9", "op-9", attempt=2, last_step="half")
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
        f"RECONCILED_OBSERVED={told}",
        "RECONCILED_OPERATION=op-9",
        "RECONCILED_STEP=half",
    ]
    assert json.loads((left.directory / "child").read_bytes())["action"] == "recover"


SAID = "./recover ended with exit code {}: because"


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        (0, {}, Complete(SAID.format(0))),
        (10, {}, Retry(SAID.format(10))),
        (10, {"steps": (Step("apply", StepKind.ONCE, done=False),)}, RollForward(SAID.format(10))),
        (10, {"undoes": "op-8"}, RollForward(SAID.format(10))),
        (11, {}, RollBack(SAID.format(11))),
        (11, {"undoes": "op-8"}, RollForward(SAID.format(11))),
        (12, {}, Hold("recover wants a person to look", SAID.format(12))),
        (1, {"attempt": 2}, Wait(2, SAID.format(1))),
        (13, {"attempt": 6}, Wait(32, SAID.format(13))),
        (13, {"attempt": 60}, Wait(300, SAID.format(13))),
    ],
)
async def test_recover_decides(
    tmp_path: Path, code: int, fields: dict[str, Any], expected: Decision
) -> None:
    """Each exit code of recover is one decision; after an unknown one it is asked again, later."""
    spec = Exec(["true"], recover=script(tmp_path, "recover", f"echo because; exit {code}"))
    left = Left("apply", tmp_path / "op-9", undoes=fields.get("undoes", ""))
    _, request = ask(tmp_path, spec, interrupted=left)
    _, decision = await decide(request, **fields)
    assert decision == expected


async def test_recover_that_cannot_start(tmp_path: Path) -> None:
    """A recover that is missing has not answered: it is asked again, it may come."""
    left = Left("apply", tmp_path / "op-9")
    _, request = ask(tmp_path, Exec(["true"], recover=["./gone"]), interrupted=left)
    _, decision = await decide(request)
    assert isinstance(decision, Wait)
    assert decision.reason.startswith("./gone cannot be started: there is no ")


async def test_c02_recover_that_is_killed(tmp_path: Path) -> None:
    """C02: a recover that dies by a signal has said nothing: no opinion, on an unknown state."""
    spec = Exec(
        ["true"],
        check=script(tmp_path, "check", "exit 1"),
        recover=script(tmp_path, "recover", "kill -9 $$"),
    )
    _, request = ask(tmp_path, spec, interrupted=Left("apply", tmp_path / "op-9"))
    seen, decision = await decide(request)
    assert (seen.state, decision) == (Observed.UNKNOWN, None)
    assert isinstance(ExecReconciler().recover(interrupted(spec, undoes="op-8"), seen), Wait)
    assert isinstance(ExecReconciler().recover(interrupted(spec, removal=True), seen), Wait)


async def test_program_that_ended_well(tmp_path: Path) -> None:
    """Exit 0 of a program that outlived its daemon settles it; recover is not asked."""
    ended = ProgramEnd("apply", 0)
    spec = Exec(["true"], recover=script(tmp_path, "recover", "exit 12"))
    left = Left("apply", tmp_path / "op-9", ended=ended)
    _, request = ask(tmp_path, spec, interrupted=left)
    _, decision = await decide(request, ended=ended)
    assert decision == Complete("apply ended with exit code 0 after its daemon was gone")
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
def test_program_that_ended_otherwise(
    ended: ProgramEnd | None, fields: dict[str, Any], expected: Decision | None
) -> None:
    """Another exit code failed, as if seen; a signal, another program or nothing says nothing."""
    spec = Exec(["true"])
    seen = Observation(Observed.DIFFERENT)
    facts = interrupted(spec, ended=ended, **fields)
    assert ExecReconciler().recover(facts, seen) == expected


async def test_once(tmp_path: Path) -> None:
    """With once, apply is a step that no policy runs again; otherwise it is idempotent."""
    for once, kind in ((True, StepKind.ONCE), (False, StepKind.IDEMPOTENT)):
        fake, request = ask(tmp_path, Exec(["true"], once=once))
        fake.interrupted = Kinds("apply", tmp_path / "op")
        await ExecReconciler().reconcile(request)
        assert fake.operations[0].steps == {"apply": kind.value}


class Kinds(FakeOperation):
    """Keeps the kinds of its steps."""

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
    """Rollback runs in the undoing operation, critical as apply is, and is told what it undoes."""
    spec = Exec(
        ["true"],
        rollback=script(tmp_path, "rollback", "env | grep ^RECONCILED > env"),
        critical=CriticalPart(Seconds(5)),
    )
    undoing = Undoing("rollback", tmp_path / "op-10", "op-10")
    fake, request = ask(tmp_path, spec, interrupted=undoing)
    await ExecReconciler().undo(request, Step("apply", StepKind.IDEMPOTENT, done=True))
    told = (tmp_path / "env").read_text().splitlines()
    for line in ("ACTION=rollback", "UNDOES=op-9", "OPERATION=op-10"):
        assert f"RECONCILED_{line}" in told
    assert fake.operations[0].budgets == [5]


async def test_rollback_fails(tmp_path: Path) -> None:
    """A rollback that fails says so; without one nothing can be undone."""
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
        ({"environment": {"RECONCILED_KEY": "x"}}, "environment may not set RECONCILED_KEY: "),
        ({"environment": {"A=B": "x"}}, "environment cannot set 'A=B'"),
    ],
)
def test_spec_is_refused(fields: dict[str, Any], message: str) -> None:
    """A spec that cannot work is refused when it is read, with what to write instead."""
    with pytest.raises(ValueError, match=message):
        Exec(**{"apply": ["true"], **fields})


@pytest.mark.parametrize("budget", ["0s", "5", "soon", "", 5])
def test_budget_is_refused(budget: object) -> None:
    """A budget is a positive duration with a unit."""
    with pytest.raises(Invalid, match=r"budget must be longer|is not a duration|duration"):
        Structurer().structure(CriticalPart, {"budget": budget}, Positions("f", Location(1, 1)))


def test_kind() -> None:
    """The kind is Exec, as manifests have it."""
    assert ExecReconciler.kind == "Exec"


# -- secrets -----------------------------------------------------------------


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the service manager has put the credential api-token."""
    directory = tmp_path / "credentials"
    directory.mkdir()
    (directory / "api-token").write_text("tok-Q7x9\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(directory))
    return directory


SECRETIVE: dict[str, str | Secret] = {"TOKEN": Secret("api-token"), "PLAIN": "text"}


@pytest.mark.usefixtures("credentials")
async def test_a_program_finds_the_secret_itself(tmp_path: Path) -> None:
    """A secret of ``environment`` is a variable of each program, without its line end."""
    told = 'printf "%s|" "$TOKEN" "$PLAIN" >> told'
    spec = Exec(
        check=script(tmp_path, "check", f"{told}\ntest -e done || exit 1"),
        apply=script(tmp_path, "apply", f"{told}\ncat > done\nenv > environment"),
        environment=SECRETIVE,
    )
    raw = {"environment": {"TOKEN": {"credential": "api-token"}}}
    _, request = ask(tmp_path, spec, raw_spec=raw)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.DONE
    assert (tmp_path / "told").read_text() == "tok-Q7x9|text|" * 3
    # On standard input, as everywhere else, stands the reference.
    assert json.loads((tmp_path / "done").read_text()) == raw
    assert "CREDENTIALS_DIRECTORY" not in (tmp_path / "environment").read_text()


async def test_the_secret_of_now_counts(tmp_path: Path, credentials: Path) -> None:
    """A secret is read when a program is started, and not when its manifest was."""
    spec = Exec(apply=script(tmp_path, "apply", 'echo "$TOKEN" >> told'), environment=SECRETIVE)
    for token in ("first", "second"):
        (credentials / "api-token").write_text(token)
        _, request = ask(tmp_path, spec)
        await ExecReconciler().reconcile(request)
    assert (tmp_path / "told").read_text() == "first\nsecond\n"


@pytest.mark.usefixtures("credentials")
async def test_no_file_holds_the_secret(tmp_path: Path) -> None:
    """While a program of an operation runs its secret is in no file of the state directory."""
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    spec = Exec(apply=script(tmp_path, "apply", "read _ < go"), environment=SECRETIVE)
    fake, request = ask(tmp_path, spec)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ExecReconciler().reconcile, request)
        # To be opened by the program: then it runs.
        writer = await trio.to_thread.run_sync(os.open, fifo, os.O_WRONLY)
        files = [path for path in fake.state.rglob("*") if path.is_file()]
        assert fake.operations[0].directory / "child" in files
        assert not [path for path in files if b"tok-Q7x9" in path.read_bytes()]
        os.close(writer)


@pytest.mark.parametrize("once", [False, True])
async def test_a_missing_secret_is_a_failed_run(
    tmp_path: Path, credentials: Path, *, once: bool
) -> None:
    """Without its secret a run fails before its operation begins, and says what brings it."""
    (credentials / "api-token").unlink()
    spec = Exec(apply=script(tmp_path, "apply", ""), environment=SECRETIVE, once=once)
    fake, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert result.outcome is Outcome.RETRY
    assert result.reason.startswith("environment has no TOKEN: credential api-token was not handed")
    assert "LoadCredential=api-token:" in result.reason
    assert (runs(tmp_path), fake.operations) == ([], [])


async def test_what_is_there_is_unknown_without_the_secret(
    tmp_path: Path, credentials: Path
) -> None:
    """A check that cannot have its secret says nothing of what is there: neither yes nor no."""
    (credentials / "api-token").unlink()
    spec = Exec(
        check=script(tmp_path, "check", ""),
        apply=["x"],
        recover=script(tmp_path, "recover", ""),
        rollback=["x"],
        environment=SECRETIVE,
    )
    _, request = ask(tmp_path, spec)
    seen = await ExecReconciler().observe(request)
    assert seen is not None
    assert (seen.state, runs(tmp_path)) == (Observed.UNKNOWN, [])
    with pytest.raises(ProgramFailed, match="no TOKEN"):
        await ExecReconciler().plan(request)
    with pytest.raises(ProgramFailed, match="no TOKEN"):
        await ExecReconciler().undo(request, Step("apply", StepKind.IDEMPOTENT, done=True))


async def test_a_secret_that_no_variable_can_hold(tmp_path: Path, credentials: Path) -> None:
    """A secret with a NUL is refused by name, and is not shown."""
    (credentials / "api-token").write_bytes(b"tok\0Q7x9")
    spec = Exec(apply=script(tmp_path, "apply", ""), environment=SECRETIVE)
    _, request = ask(tmp_path, spec)
    result = await ExecReconciler().reconcile(request)
    assert result.reason == "environment has no TOKEN: its secret has a NUL character"
