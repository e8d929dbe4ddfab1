"""The ``exec`` reconciler: programs of any kind check, apply and remove.

1. It uses the public plugin interface alone.
2. ``check`` decides whether an apply is needed; without one, a spec that differs from the last
   applied one decides. Exit codes alone decide outcomes; output is for people.
3. After an interruption the program ``recover`` decides. It runs in observe(), because recover()
   is a pure function: its exit code is part of the observation.
4. Secrets in ``environment`` are read when a program is started, before its operation begins: a
   missing secret fails the run before any effect. Only that program gets the values.
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
                f"environment must not set {name}: names that begin with {_RESERVED} are reserved"
                " for the daemon; choose another name"
            )
        if not name or "=" in name or "\0" in name + (text if isinstance(text, str) else ""):
            raise ValueError(
                f"environment cannot set {name!r}: write a name without '=' and NUL, and a value"
                " without NUL"
            )


_optional_program = attrs.validators.optional(_validate_program)


@attrs.frozen
class CriticalPart:
    """How long ``apply``, ``remove`` and ``rollback`` may continue during a stop."""

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
    """Runs the programs of an Exec; a failed program is a retry that quotes its last lines."""

    kind = "Exec"

    def budget(self, spec: Exec) -> float | None:
        """The budget that ``critical`` declares, in seconds."""
        return spec.critical.budget if spec.critical else None

    async def reconcile(self, request: Request[Exec]) -> Result:
        """Run ``check``, then ``apply`` if needed, then ``check`` again."""
        try:
            if await _is_as_desired(request):
                return done()
            kind = StepKind.ONCE if request.spec.once else StepKind.IDEMPOTENT
            await _run_operation(request, "apply", request.spec.apply, kind)
            # During a stop the second check is skipped to save time: the next start checks.
            if request.spec.check is None or request.stopping:
                return done("applied")
            ended = await _check(request, request.spec.check)
        except ProgramFailed as failure:
            return _failure_result(failure)
        if ended.code == _AS_DESIRED:
            return done("applied")
        return retry(f"still not as desired after apply: {ended}")

    async def remove(self, request: Request[Exec]) -> Result:
        """Run ``remove`` after the manifest was deleted; without one only the key is forgotten."""
        if request.spec.remove is None:
            return done()
        try:
            await _run_operation(request, "remove", request.spec.remove)
        except ProgramFailed as failure:
            return _failure_result(failure)
        return done("removed")

    async def plan(self, request: Request[Exec]) -> list[Change]:
        """Whether apply would run. Runs ``check`` only; raises ProgramFailed if it fails."""
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
        """The result of ``check``; None without one, since a repetition could not help.

        After an interruption also the result of ``recover``, unless the interrupted program ended
        with an exit code.
        """
        seen = await _observe_state(request)
        interrupted = request.interrupted
        if interrupted is None or request.spec.recover is None or has_own_outcome(interrupted):
            return None if request.spec.check is None else seen
        return await _run_recover(request, request.spec.recover, interrupted, seen)

    def recover(self, interrupted: Interrupted, observation: Observation | None) -> Decision | None:
        """Decide by the program's exit code, else by ``recover``; None without either."""
        has_recover = interrupted.spec.recover is not None
        return decide_recovery(interrupted, observation, has_recover=has_recover)

    def can_undo(self, spec: Exec) -> bool:
        """Whether the spec has a ``rollback``."""
        return spec.rollback is not None

    async def undo(self, request: Request[Exec], step: Step) -> None:  # noqa: ARG002 apply is all
        """Run ``rollback``, critical as apply is. Raises ProgramFailed."""
        if request.spec.rollback is None:
            raise ProgramFailed("cannot roll back: the spec that was applied has no rollback")
        variables = _variables(request.spec)
        async with request.operation("rollback") as operation, _shield(request, operation):
            variables["RECONCILED_UNDOES"] = operation.undoes
            (await _run(request, "rollback", request.spec.rollback, variables, operation)).check()


async def _observe_state(request: Request[Exec]) -> Observation:
    if request.spec.check is None:
        return Observation(Observed.UNKNOWN, "the spec has no check")
    try:
        ended = await _check(request, request.spec.check)
    except ProgramFailed as failure:
        return Observation(Observed.UNKNOWN, str(failure))
    state = Observed.AS_DESIRED if ended.code == _AS_DESIRED else Observed.DIFFERENT
    return Observation(state, str(ended))


async def _run_recover(
    request: Request[Exec], argv: list[str], interrupted: RecoveringOperation, seen: Observation
) -> Observation:
    """*seen* with the exit code of ``recover``; UNKNOWN if a signal ended it."""
    additions = {
        "RECONCILED_OBSERVED": _OBSERVED_TEXT[seen.state],
        "RECONCILED_ACTION": action_of(interrupted),
    }
    if interrupted.undoes:
        additions["RECONCILED_UNDOES"] = interrupted.undoes
    try:
        variables = {**_variables(request.spec), **additions}
        ended = await _run(request, "recover", argv, variables, interrupted)
    except ProgramFailed as failure:
        return attrs.evolve(seen, data={"code": None, "text": str(failure)})
    if ended.code is None:
        # It was interrupted, and may itself be what kills the daemon: that is no result.
        return Observation(Observed.UNKNOWN, str(ended))
    return attrs.evolve(seen, data={"code": ended.code, "text": str(ended)})


async def _is_as_desired(request: Request[Exec]) -> bool:
    if request.spec.check is None:
        return request.applied == request.fingerprint
    return (await _check(request, request.spec.check)).code == _AS_DESIRED


def _failure_result(failure: ProgramFailed) -> Result:
    """A retry. Raises *failure* if a signal ended the program, as when memory runs out.

    A returned retry would count as the program's own outcome: a program that is killed each time
    would be retried for ever and never held.
    """
    if failure.ended is not None and failure.ended.code is None:
        raise failure
    return retry(str(failure))


async def _check(request: Request[Exec], argv: list[str]) -> Ended:
    """Run ``check``. Raises ProgramFailed unless its exit code is 0 or 1."""
    ended = await _run(request, "check", argv, _variables(request.spec))
    if ended.code == _MUST_APPLY:
        return ended
    return ended.check()


async def _run_operation(
    request: Request[Exec], action: str, argv: list[str], kind: StepKind = StepKind.IDEMPOTENT
) -> None:
    """Run *argv* as an operation, critical if the spec says so. Raises ProgramFailed."""
    variables = _variables(request.spec)
    async with request.operation(action) as operation:

        async def step() -> dict[str, float]:
            ended = await _run(request, action, argv, variables, operation)
            return {"duration": round(ended.check().duration, 3)}

        async with _shield(request, operation):
            # As a step its end is durable before the shield ends: an interrupted operation that
            # is entered again does not repeat a program that succeeded.
            await operation.step(action, step, kind=kind)


def _shield(request: Request[Exec], operation: Operation) -> AbstractAsyncContextManager[object]:
    critical = request.spec.critical
    return operation.critical(budget=critical.budget) if critical else contextlib.nullcontext()


def _variables(spec: Exec) -> dict[str, str]:
    """``environment`` with the present values of its secrets. Raises ProgramFailed."""
    variables = {}
    for name, given in spec.environment.items():
        try:
            variables[name] = given if isinstance(given, str) else given.reveal()
        except SecretUnavailable as error:
            raise ProgramFailed(f"cannot set {name} in environment: {error}") from error
        if "\0" in variables[name]:
            raise ProgramFailed(f"cannot set {name} in environment: its secret contains NUL")
    return variables


async def _run(
    request: Request[Exec],
    action: str,
    argv: list[str],
    variables: Mapping[str, str],
    operation: Operation | RecoveringOperation | None = None,
) -> Ended:
    """Run *argv*, as a program of *operation* if given."""
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
