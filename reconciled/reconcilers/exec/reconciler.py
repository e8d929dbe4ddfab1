"""The ``exec`` reconciler: any program checks, applies and removes.

It uses what any plugin may use and nothing more. Whether an apply is needed is asked of
``check``; without one, it is needed when the spec is not the one that was last applied.
Outcomes are decided by exit codes alone; output is for people.

After an interruption ``recover`` has the say. It runs as part of observe(), since recover() is
a pure function: its exit code is data of the observation.

Secrets of ``environment`` are read when a program is started, and before its operation begins:
one that is missing is no effect that has begun. Nothing but that program gets their values.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs

from reconciled.api import (
    Change,
    Decision,
    Ended,
    Interrupted,
    Observation,
    Observed,
    Operation,
    ProgramFailed,
    Reconciler,
    RecoveringOperation,
    Request,
    Result,
    Seconds,
    Secret,
    SecretUnavailable,
    Step,
    StepKind,
    done,
    retry,
    run_program,
)
from reconciled.reconcilers.exec.recovery import action_of, decide_recovery, has_own_outcome

_RESERVED = "RECONCILED_"
_AS_DESIRED = 0
_MUST_APPLY = 1
_OBSERVED_TEXT = {Observed.AS_DESIRED: "0", Observed.DIFFERENT: "1", Observed.UNKNOWN: "unknown"}


def _validate_program(_: object, attribute: attrs.Attribute[Any], value: list[str]) -> None:
    if not value or not value[0]:
        raise ValueError(
            f"{attribute.name} names no program: write its name and arguments as a list,"
            f" as in [./{attribute.name}, --all], or leave it out"
        )
    if any("\0" in argument for argument in value):
        raise ValueError(f"{attribute.name} has a NUL character: no argument can hold one")


def _validate_budget(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if value <= 0:
        raise ValueError(f"{attribute.name} must be longer than 0s, as in 2m")


def _validate_environment(_: object, __: object, value: Mapping[str, str | Secret]) -> None:
    for name, text in value.items():
        if name.startswith(_RESERVED):
            raise ValueError(
                f"environment may not set {name}: names that begin with {_RESERVED} are"
                " what the program is told about its run; choose another name"
            )
        if not name or "=" in name or "\0" in name + (text if isinstance(text, str) else ""):
            raise ValueError(
                f"environment cannot set {name!r}: no variable has such a name or text"
            )


_optional_program = attrs.validators.optional(_validate_program)


@attrs.frozen
class CriticalPart:
    """What of an Exec outlives a stop."""

    budget: Seconds = attrs.field(validator=_validate_budget)


@attrs.frozen
class Exec:
    """The spec of kind Exec. Programs are lists of arguments; no shell reads them."""

    apply: list[str] = attrs.field(validator=_validate_program)
    check: list[str] | None = attrs.field(default=None, validator=_optional_program)
    remove: list[str] | None = attrs.field(default=None, validator=_optional_program)
    recover: list[str] | None = attrs.field(default=None, validator=_optional_program)
    rollback: list[str] | None = attrs.field(default=None, validator=_optional_program)
    critical: CriticalPart | None = None
    once: bool = False
    environment: dict[str, str | Secret] = attrs.field(
        factory=dict, validator=_validate_environment
    )
    directory: str = "."  # relative to the manifest


class ExecReconciler(Reconciler[Exec]):
    """Runs the programs of one Exec; each failure is a retry with their last lines."""

    kind = "Exec"

    def budget(self, spec: Exec) -> float | None:
        """What ``critical`` asks for, in seconds."""
        return spec.critical.budget if spec.critical else None

    async def reconcile(self, request: Request[Exec]) -> Result:
        """Check, apply if that says so, and check again."""
        try:
            if await _is_as_desired(request):
                return done()
            kind = StepKind.ONCE if request.spec.once else StepKind.IDEMPOTENT
            await _run_operation(request, "apply", request.spec.apply, kind)
            # During a stop the next start checks anyway, and every second counts.
            if request.spec.check is None or request.stopping:
                return done("applied")
            ended = await _check(request, request.spec.check)
        except ProgramFailed as failure:
            return _failure_result(failure)
        if ended.code == _AS_DESIRED:
            return done("applied")
        return retry(f"still not as desired after apply: {ended}")

    async def remove(self, request: Request[Exec]) -> Result:
        """Run ``remove``, when the manifest is gone; without one the key is only forgotten."""
        if request.spec.remove is None:
            return done()
        try:
            await _run_operation(request, "remove", request.spec.remove)
        except ProgramFailed as failure:
            return _failure_result(failure)
        return done("removed")

    async def plan(self, request: Request[Exec]) -> list[Change]:
        """Whether apply would run. Runs ``check`` alone; raises ProgramFailed if that fails."""
        spec = request.spec
        if spec.check is None:
            if request.applied == request.fingerprint:
                return []
            return [Change("run", spec.apply[0], "the spec is not the one last applied")]
        ended = await _check(request, spec.check)
        if ended.code == _AS_DESIRED:
            return []
        return [Change("run", spec.apply[0], "\n".join(ended.tail))]

    async def observe(self, request: Request[Exec]) -> Observation | None:
        """What ``check`` says; None without one, for to ask again could not help.

        After an interruption also what ``recover`` says, unless the program itself had the
        last word.
        """
        seen = await _observe_state(request)
        interrupted = request.interrupted
        if interrupted is None or request.spec.recover is None or has_own_outcome(interrupted):
            return None if request.spec.check is None else seen
        return await _run_recover(request, request.spec.recover, interrupted, seen)

    def recover(self, interrupted: Interrupted, observation: Observation | None) -> Decision | None:
        """Take over how its program ended, else do what ``recover`` said; no opinion without."""
        asked = interrupted.spec.recover is not None
        return decide_recovery(interrupted, observation, has_recover=asked)

    def can_undo(self, spec: Exec) -> bool:
        """Whether there is a ``rollback``."""
        return spec.rollback is not None

    async def undo(self, request: Request[Exec], step: Step) -> None:  # noqa: ARG002 apply is all
        """Run ``rollback``, critical as apply is. Raises ProgramFailed."""
        if request.spec.rollback is None:
            raise ProgramFailed("there is no rollback in the spec that was applied")
        variables = _variables(request.spec)
        async with request.operation("rollback") as operation, _shield(request, operation):
            variables["RECONCILED_UNDOES"] = operation.undoes
            (await _run(request, "rollback", request.spec.rollback, variables, operation)).check()


async def _observe_state(request: Request[Exec]) -> Observation:
    if request.spec.check is None:
        return Observation(Observed.UNKNOWN, "there is no check to ask")
    try:
        ended = await _check(request, request.spec.check)
    except ProgramFailed as failure:
        return Observation(Observed.UNKNOWN, str(failure))
    state = Observed.AS_DESIRED if ended.code == _AS_DESIRED else Observed.DIFFERENT
    return Observation(state, str(ended))


async def _run_recover(
    request: Request[Exec], argv: list[str], interrupted: RecoveringOperation, seen: Observation
) -> Observation:
    """*seen*, with what ``recover`` answered; UNKNOWN where it gave no answer."""
    told = {
        "RECONCILED_OBSERVED": _OBSERVED_TEXT[seen.state],
        "RECONCILED_ACTION": action_of(interrupted),
    }
    if interrupted.undoes:
        told["RECONCILED_UNDOES"] = interrupted.undoes
    try:
        variables = {**_variables(request.spec), **told}
        ended = await _run(request, "recover", argv, variables, interrupted)
    except ProgramFailed as failure:
        return attrs.evolve(seen, data={"code": None, "said": str(failure)})
    if ended.code is None:
        # It was stopped from outside, and may be what kills: that counts as no word at all.
        return Observation(Observed.UNKNOWN, str(ended))
    return attrs.evolve(seen, data={"code": ended.code, "said": str(ended)})


async def _is_as_desired(request: Request[Exec]) -> bool:
    if request.spec.check is None:
        return request.applied == request.fingerprint
    return (await _check(request, request.spec.check)).code == _AS_DESIRED


def _failure_result(failure: ProgramFailed) -> Result:
    """A retry. Raises *failure* where a signal ended the program, by the hand of the kernel, say.

    Returned, that would count as a word of its own, and what is killed each time would be tried
    again for ever instead of being held.
    """
    if failure.ended is not None and failure.ended.code is None:
        raise failure
    return retry(str(failure))


async def _check(request: Request[Exec], argv: list[str]) -> Ended:
    """Raises ProgramFailed unless the answer is yes or no."""
    ended = await _run(request, "check", argv, _variables(request.spec))
    if ended.code == _MUST_APPLY:
        return ended
    return ended.check()


async def _run_operation(
    request: Request[Exec], action: str, argv: list[str], kind: StepKind = StepKind.IDEMPOTENT
) -> None:
    """Run *argv* as an operation, shielded if the spec says so; raises ProgramFailed."""
    variables = _variables(request.spec)
    async with request.operation(action) as operation:

        async def step() -> dict[str, float]:
            ended = await _run(request, action, argv, variables, operation)
            return {"duration": round(ended.check().duration, 3)}

        async with _shield(request, operation):
            # A step, because its end is durable before the shield ends: an operation that is
            # entered again, whatever cut it off, does not repeat a program that ended well.
            await operation.step(action, step, kind=kind)


def _shield(request: Request[Exec], operation: Operation) -> AbstractAsyncContextManager[object]:
    critical = request.spec.critical
    return operation.critical(budget=critical.budget) if critical else contextlib.nullcontext()


def _variables(spec: Exec) -> dict[str, str]:
    """``environment`` with its secrets as they are now. Raises ProgramFailed without one."""
    variables = {}
    for name, given in spec.environment.items():
        try:
            variables[name] = given if isinstance(given, str) else given.reveal()
        except SecretUnavailable as error:
            raise ProgramFailed(f"environment has no {name}: {error}") from error
        if "\0" in variables[name]:
            raise ProgramFailed(f"environment has no {name}: its secret has a NUL character")
    return variables


async def _run(
    request: Request[Exec],
    action: str,
    argv: list[str],
    variables: Mapping[str, str],
    operation: Operation | RecoveringOperation | None = None,
) -> Ended:
    """Run *argv*, a program of *operation* if there is one."""
    return await run_program(
        argv,
        operation=operation,
        output=request.output if operation is None else None,
        name=action,
        stdin=json.dumps(request.raw_spec, ensure_ascii=False).encode(),
        environment={
            "RECONCILED_KEY": request.key,
            "RECONCILED_ACTION": action,
            **variables,
        },
        directory=request.base / request.spec.directory,
    )
