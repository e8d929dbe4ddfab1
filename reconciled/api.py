"""What plugin authors import. The names in __all__ are public and stable; nothing else is.

A reconciler makes the observed state of one key match its spec and may be repeated safely::

    @attrs.frozen
    class Motd:
        path: str
        text: str

    class MotdReconciler(Reconciler[Motd]):
        async def reconcile(self, request: Request[Motd]) -> Result:
            if await read(request.spec.path) == request.spec.text:
                return done()
            async with request.operation("write") as operation:
                async with operation.critical(budget="10s"):
                    await replace_file(request.spec.path, request.spec.text)
            return done()
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import attrs

from reconciled.core.durations import Seconds, parse_duration
from reconciled.core.errors import NotJournaled, Overrun, SecretUnavailable, Terminal
from reconciled.core.recovery import (
    Abandon,
    Complete,
    Decision,
    Hold,
    Interrupted,
    Observation,
    Observed,
    ProgramEnd,
    Retry,
    RollBack,
    RollForward,
    Step,
    StepKind,
    Wait,
)
from reconciled.core.results import Outcome, Result, after, done, retry, terminal
from reconciled.files import (
    Comparison,
    FileRefused,
    Removed,
    Replaced,
    compare_file,
    digest_of,
    make_directory,
    read_file,
    remove_file,
    remove_temporary,
    replace_file,
    temporary_name,
)
from reconciled.programs import Ended, ProgramFailed, run_program
from reconciled.service.credentials import Secret

__all__ = [
    "Abandon",
    "Change",
    "Comparison",
    "Complete",
    "Critical",
    "Decision",
    "Ended",
    "FileRefused",
    "Hold",
    "Interrupted",
    "NotJournaled",
    "Observation",
    "Observed",
    "Operation",
    "Outcome",
    "Overrun",
    "ProgramEnd",
    "ProgramFailed",
    "Reconciler",
    "RecoveringOperation",
    "Removed",
    "Replaced",
    "Request",
    "Result",
    "Retry",
    "RollBack",
    "RollForward",
    "Seconds",
    "Secret",
    "SecretUnavailable",
    "Step",
    "StepKind",
    "Terminal",
    "Wait",
    "after",
    "compare_file",
    "digest_of",
    "done",
    "make_directory",
    "parse_duration",
    "read_file",
    "remove_file",
    "remove_temporary",
    "replace_file",
    "retry",
    "run_program",
    "temporary_name",
    "terminal",
]

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class Critical(Protocol):
    """An open critical part of an operation."""

    @property
    def remaining(self) -> float:
        """Seconds until it is cut; a stop can only lower it."""


class Operation(Protocol):
    """A unit of work that must not be left half-done. Opened by ``request.operation(name)``."""

    @property
    def id(self) -> str:
        """Globally unique, sortable by time, never reused: the idempotency key."""

    @property
    def name(self) -> str:
        """The name that the reconciler gave it in ``request.operation(name)``."""

    @property
    def attempt(self) -> int:
        """The number of this attempt at the operation: 1 for the first, one more each time."""

    @property
    def epoch(self) -> int:
        """The number of this start of the daemon: rises with each, for targets that fence."""

    @property
    def undoes(self) -> str:
        """The id of the operation that this one undoes; empty for any other operation."""

    @property
    def directory(self) -> Path:
        """``STATE/operations/ID``, for files of its programs. Made on first use; raises OSError."""

    @property
    def last_step(self) -> str:
        """The name of the last step that is done; empty before the first."""

    def critical(self, *, budget: float | str) -> AbstractAsyncContextManager[Critical]:
        """The part that a stop must not cut: shielded for *budget* (seconds, or ``"10s"``).

        The budget counts from entry and includes waiting, so take locks before. Raises
        ValueError if it is not positive, or longer than ``stop.critical``; trio.Cancelled at
        entry if the run is cancelled or a stop is past its drain; Overrun if the body was cut
        off. A cancellation that arrives meanwhile is delivered at the first checkpoint after the
        operation: a ``return done()`` right behind it still counts.
        """

    async def step(
        self,
        name: str,
        function: Callable[[], Awaitable[Any]],
        *,
        kind: StepKind = StepKind.IDEMPOTENT,
    ) -> Any:
        """Run *function* as step *name*, or return its stored data if the step is done.

        Returns what *function* returned, which must be expressible in JSON: TypeError otherwise.
        The data is durable before the next step starts, and that of a ONCE step before this
        returns. A cancellation inside *function* leaves the step started and without a result:
        *kind* says what recovery may do with it then.
        """


class RecoveringOperation(Operation, Protocol):
    """The interrupted operation, as observe() sees it during recovery."""

    @property
    def ended(self) -> ProgramEnd | None:
        """How a program of it ended that outlived the daemon; None: there is no such record."""


class Request(Protocol[S_co]):
    """One run for one key, or one plan for it."""

    @property
    def key(self) -> str:
        """The key: ``controller/name``, or ``controller/namespace/name``."""

    @property
    def name(self) -> str:
        """The name of the resource, ``metadata.name`` of the manifest."""

    @property
    def namespace(self) -> str | None:
        """The namespace, ``metadata.namespace`` of the manifest; None if it has none."""

    @property
    def labels(self) -> dict[str, str]:
        """``metadata.labels`` of the manifest, a copy; empty if it has none."""

    @property
    def annotations(self) -> dict[str, str]:
        """``metadata.annotations`` of the manifest, a copy; empty if it has none."""

    @property
    def spec(self) -> S_co:
        """The spec as an object of the reconciler's spec class.

        All runs of a manifest share one object: do not modify it.
        """

    @property
    def raw_spec(self) -> dict[str, Any]:
        """The spec as plain data, as it was declared. Do not modify what is nested in it."""

    @property
    def fingerprint(self) -> str:
        """A content hash of kind and spec: 32 hexadecimal digits, equal for equal specs."""

    @property
    def applied(self) -> str | None:
        """The fingerprint of the spec that was last applied to this key, across restarts.

        None: none was, or its removal has begun.
        """

    @property
    def base(self) -> Path:
        """The directory of the manifest's file: relative paths of a spec start here."""

    @property
    def output(self) -> Path:
        """A directory below ``STATE/output`` for the output of programs outside operations.

        Not made in advance; deleted with the key.
        """

    @property
    def memory(self) -> Path:
        """A directory below ``STATE/memory`` for what the reconciler remembers of the key.

        Not made in advance: use make_directory(). Deleted with the key. Read-only in plan().
        """

    @property
    def causes(self) -> tuple[str, ...]:
        """Why this run happens, such as ``changed`` or ``every 10m``. For logs, not decisions."""

    @property
    def failures(self) -> int:
        """The number of failed runs in a row before this one."""

    @property
    def interrupted(self) -> RecoveringOperation | None:
        """In an observe() during recovery: the interrupted operation. None in every other call."""

    @property
    def stopping(self) -> bool:
        """True once a stop of the daemon or of this run has begun.

        Leave out then what the next start would do anyway.
        """

    @property
    def critical_limit(self) -> float:
        """``stop.critical`` in seconds: a longer critical budget is refused."""

    @property
    def log(self) -> Any:
        """A logger that adds the key and the run: ``request.log.info("motd.written", size=12)``.

        It has debug(), info(), warning() and error(). None of them blocks, or is a checkpoint.
        """

    def operation(self, name: str) -> AbstractAsyncContextManager[Operation]:
        """Open the operation *name*: its intent is durable before the body runs.

        One operation of a key is open at a time. After an interruption the same name re-enters
        the interrupted one. Raises trio.Cancelled at entry if the run is cancelled or a stop
        is past its drain, NotJournaled if the intent cannot be made durable, and RuntimeError
        for another name than that of an interrupted operation, or in plan(). A body that is
        cancelled or killed leaves the operation interrupted, for recovery.
        """

    def cleanup(self) -> AbstractAsyncContextManager[None]:
        """A shielded scope for awaiting in ``finally`` blocks, with ``stop.cleanup`` to spend.

        At the end of that time the body is cancelled and the overrun is logged; the context
        manager itself raises nothing. RuntimeError in plan().
        """


@attrs.frozen
class Change:
    """One thing that a plan says would be done, as text for a person."""

    action: str  # create, change, remove, run …
    what: str  # path, program, object
    detail: str = ""  # for example a unified diff


class Reconciler(abc.ABC, Generic[S]):
    """Makes observed state match the spec, key by key. Subclass it as ``Reconciler[Spec]``.

    One instance serves all keys of one controller; runs of different keys overlap. A subclass
    has the optional methods remove(), plan() and undo() if it overrides them; the daemon never
    calls the ones that are defined here.

    kind      the manifest kind it takes; by default the name of its spec class
    Options   attrs class for the controller's ``options``; None: it takes none
    """

    kind: ClassVar[str]
    Options: ClassVar[type | None] = None

    def __init__(self, options: Any = None) -> None:
        """Keep *options*, an object of Options or None. Must not block, or have effects."""
        self.options = options

    @abc.abstractmethod
    async def reconcile(self, request: Request[S]) -> Result:
        """Observe, compare, and do what is missing, with every effect inside an operation.

        May run again at any time. Return done(), after(), retry() or terminal(). Raising
        Terminal is terminal(); any other exception is a retry with backoff. A stop, the
        controller's ``timeout`` or the removal of the manifest raises trio.Cancelled at the
        next checkpoint: let it pass, and clean up inside ``request.cleanup()``.
        """

    async def remove(self, request: Request[S]) -> Result:
        """Optional: undo what was applied, once the manifest is removed.

        Results, exceptions and cancellation are those of reconcile(); it may run again. The key
        is forgotten after done(). Without an override the key is only forgotten, and what was
        applied remains.
        """
        raise NotImplementedError

    async def plan(self, request: Request[S]) -> list[Change]:
        """Optional: what reconcile() would do now, without effects; an empty list: nothing.

        An exception is shown as the reason why the key cannot be planned. Cancelled after 60 s.
        Without an override the plan of each key is shown as unknown.
        """
        raise NotImplementedError

    async def undo(self, request: Request[S], step: Step) -> None:
        """Optional: undo *step* of an operation that is rolled back.

        Called for each step that is done or was started, newest first, except PURE ones; so it
        must be safe for a step that had no effect, and safe to repeat. ``request.spec`` is the
        spec of the operation. ``request.operation()`` returns the undoing operation, whatever
        its name. An exception is a failed run, and undo() is called again after the backoff; a
        cancellation interrupts it, and recovery calls it again. Without an override (or where
        can_undo() is False) a roll-back holds the key.
        """
        raise NotImplementedError

    async def observe(self, request: Request[S]) -> Observation | None:  # noqa: ARG002 - for overrides
        """Measure the present state, without effects. None: this reconciler cannot.

        Called first in the recovery of an interrupted operation. An exception counts as
        Observed.UNKNOWN. Cancelled like reconcile().
        """
        return None

    def recover(
        self,
        interrupted: Interrupted,  # noqa: ARG002 - for overrides
        observation: Observation | None,  # noqa: ARG002 - for overrides
    ) -> Decision | None:
        """Decide about an interrupted operation: a pure function of its arguments.

        None: no opinion, so that the observation and the controller's ``interrupted:`` policy
        decide. An exception, or anything that is not a decision, holds the key.
        """
        return None

    def budget(self, spec: S) -> float | None:  # noqa: ARG002 - for overrides
        """The longest critical budget that *spec* asks for, in seconds; None: not known.

        Pure, and may run in a thread. A manifest whose budget is longer than ``stop.critical``,
        or for which this raises, is invalid.
        """
        return None

    def can_undo(self, spec: S) -> bool:  # noqa: ARG002 - for overrides
        """Whether undo() can undo an operation with *spec*. By default: if it is overridden.

        Pure. An exception is a failed run.
        """
        return has_method(self, "undo")


def has_method(reconciler: Reconciler[Any], name: Literal["remove", "plan", "undo"]) -> bool:
    """Whether *reconciler* has the optional method *name*: it is overridden, and not by None."""
    method = getattr(reconciler, name)
    return method is not None and getattr(method, "__func__", None) is not getattr(Reconciler, name)
