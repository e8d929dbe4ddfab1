"""The ``exec`` reconciler: any program checks, applies and removes.

It uses what any plugin may use and nothing more. Whether an apply is needed is asked of
``check``; without one, it is needed when the spec is not the one that was last applied.
Outcomes are decided by exit codes alone; output is for people.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from reconciled.api import (
    Change,
    Ended,
    Operation,
    ProgramFailed,
    Reconciler,
    Request,
    Result,
    Seconds,
    done,
    retry,
    run_program,
)

_RESERVED = "RECONCILED_"
_AS_DESIRED = 0
_MUST_APPLY = 1


def _program(_: object, attribute: attrs.Attribute[Any], value: list[str]) -> None:
    if not value or not value[0]:
        raise ValueError(
            f"{attribute.name} names no program: write its name and arguments as a list,"
            f" as in [./{attribute.name}, --all], or leave it out"
        )
    if any("\0" in argument for argument in value):
        raise ValueError(f"{attribute.name} has a NUL character: no argument can hold one")


def _budget(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if value <= 0:
        raise ValueError(f"{attribute.name} must be longer than 0s, as in 2m")


def _environment(_: object, __: object, value: Mapping[str, str]) -> None:
    for name, text in value.items():
        if name.startswith(_RESERVED):
            raise ValueError(
                f"environment may not set {name}: names that begin with {_RESERVED} are"
                " what the program is told about its run; choose another name"
            )
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(
                f"environment cannot set {name!r}: no variable has such a name or text"
            )


_optional_program = attrs.validators.optional(_program)


@attrs.frozen
class CriticalPart:
    """What of an Exec outlives a stop."""

    budget: Seconds = attrs.field(validator=_budget)


@attrs.frozen
class Exec:
    """The spec of kind Exec. Programs are lists of arguments; no shell reads them."""

    apply: list[str] = attrs.field(validator=_program)
    check: list[str] | None = attrs.field(default=None, validator=_optional_program)
    remove: list[str] | None = attrs.field(default=None, validator=_optional_program)
    recover: list[str] | None = attrs.field(default=None, validator=_optional_program)
    rollback: list[str] | None = attrs.field(default=None, validator=_optional_program)
    critical: CriticalPart | None = None
    once: bool = False
    environment: dict[str, str] = attrs.field(factory=dict, validator=_environment)
    directory: str = "."  # relative to the manifest


class ExecReconciler(Reconciler[Exec]):
    """Runs the programs of one Exec; each failure is a retry with their last lines."""

    kind = "Exec"

    def budget(self, spec: Exec) -> float | None:
        """What ``critical`` asks for, in seconds."""
        return spec.critical.budget if spec.critical else None

    def not_built(self, spec: Exec) -> list[str]:
        """The fields of *spec* that are accepted, and have no effect in this release."""
        named = {"recover": spec.recover, "rollback": spec.rollback, "once": spec.once}
        return [name for name, value in named.items() if value]

    async def reconcile(self, request: Request[Exec]) -> Result:
        """Check, apply if that says so, and check again."""
        try:
            if await _as_desired(request):
                return done()
            await _operate(request, "apply", request.spec.apply)
            # During a stop the next start checks anyway, and every second counts.
            if request.spec.check is None or request.stopping:
                return done("applied")
            ended = await _check(request, request.spec.check)
        except ProgramFailed as failure:
            return retry(str(failure))
        if ended.code == _AS_DESIRED:
            return done("applied")
        return retry(f"still not as desired after apply: {ended}")

    async def remove(self, request: Request[Exec]) -> Result:
        """Run ``remove``, when the manifest is gone; without one the key is only forgotten."""
        if request.spec.remove is None:
            return done()
        try:
            await _operate(request, "remove", request.spec.remove)
        except ProgramFailed as failure:
            return retry(str(failure))
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


async def _as_desired(request: Request[Exec]) -> bool:
    if request.spec.check is None:
        return request.applied == request.fingerprint
    return (await _check(request, request.spec.check)).code == _AS_DESIRED


async def _check(request: Request[Exec], argv: list[str]) -> Ended:
    """Raises ProgramFailed unless the answer is yes or no."""
    ended = await _run(request, "check", argv, request.output, {})
    if ended.code == _MUST_APPLY:
        return ended
    return ended.check()


async def _operate(request: Request[Exec], action: str, argv: list[str]) -> None:
    """Run *argv* as an operation, shielded if the spec says so; raises ProgramFailed."""
    critical = request.spec.critical
    async with request.operation(action) as operation:

        async def step() -> dict[str, float]:
            identity = _identity(operation)
            ended = await _run(request, action, argv, operation.directory, identity)
            return {"duration": round(ended.check().duration, 3)}

        shield = operation.critical(budget=critical.budget) if critical else _NO_SHIELD
        async with shield:
            # A step, because its end is durable before the shield ends: an operation that is
            # entered again, whatever cut it off, does not repeat a program that ended well.
            await operation.step(action, step)


_NO_SHIELD = contextlib.nullcontext()


def _identity(operation: Operation) -> dict[str, str]:
    return {
        "RECONCILED_OPERATION": operation.id,
        "RECONCILED_ATTEMPT": str(operation.attempt),
        "RECONCILED_STEP": operation.last_step,
        "RECONCILED_EPOCH": str(operation.epoch),
    }


async def _run(
    request: Request[Exec], action: str, argv: list[str], output: Path, identity: dict[str, str]
) -> Ended:
    told = {"RECONCILED_KEY": request.key, "RECONCILED_ACTION": action, **identity}
    return await run_program(
        argv,
        output=output,
        name=action,
        stdin=json.dumps(request.raw_spec, ensure_ascii=False).encode(),
        environment={**request.spec.environment, **told},
        directory=request.base / request.spec.directory,
    )
