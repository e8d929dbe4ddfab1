"""What plugin authors import. Everything here is public and stable; nothing else is.

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
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import attrs

from reconciled.core.durations import Seconds, parse_duration
from reconciled.core.errors import SecretUnavailable, Terminal
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
    "Observation",
    "Observed",
    "Operation",
    "Outcome",
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
        """As the reconciler named it."""

    @property
    def attempt(self) -> int:
        """1 for the first one."""

    @property
    def epoch(self) -> int:
        """The number of this start of the daemon: rises with each, for targets that fence."""

    @property
    def undoes(self) -> str:
        """The id of the operation that this one takes back; empty: none."""

    @property
    def directory(self) -> Path:
        """``STATE/operations/ID``: made on first use, for output of its programs."""

    @property
    def last_step(self) -> str:
        """The last step that is durable; empty before the first."""

    def critical(self, *, budget: float | str) -> AbstractAsyncContextManager[Critical]:
        """The part that outlives a stop, for *budget* at most (seconds or ``"10s"``).

        The budget counts from entry, whatever cancels the surroundings. Raises trio.Cancelled
        at entry where work is cancelled already, and Overrun if the body was cut off. A
        cancellation that arrives meanwhile is delivered at the first checkpoint after the
        operation: a ``return done()`` right behind it still counts.
        """

    async def step(
        self,
        name: str,
        function: Callable[[], Awaitable[Any]],
        *,
        kind: StepKind = StepKind.IDEMPOTENT,
    ) -> Any:
        """Run *function* as step *name*, or give its checkpoint data if it is done already.

        The data must be what JSON can express. It is durable before the next step starts, and
        that of a ONCE step before this returns.
        """


class RecoveringOperation(Operation, Protocol):
    """The interrupted operation, for an observe() that is asked for its recovery."""

    @property
    def ended(self) -> ProgramEnd | None:
        """How its program ended after the daemon was gone; None: no record, or none outlived it."""


class Request(Protocol[S_co]):
    """One run for one key."""

    @property
    def key(self) -> str:
        """``controller/name``, or ``controller/namespace/name``."""

    @property
    def name(self) -> str:
        """Of the manifest."""

    @property
    def namespace(self) -> str | None:
        """Of the manifest."""

    @property
    def labels(self) -> dict[str, str]:
        """Of the manifest."""

    @property
    def annotations(self) -> dict[str, str]:
        """Of the manifest."""

    @property
    def spec(self) -> S_co:
        """The spec, as an object of the reconciler's class."""

    @property
    def raw_spec(self) -> dict[str, Any]:
        """The spec as plain data, as it was declared."""

    @property
    def fingerprint(self) -> str:
        """Content hash of the spec."""

    @property
    def applied(self) -> str | None:
        """Fingerprint of the spec that was last done for this key, across restarts."""

    @property
    def base(self) -> Path:
        """The directory of the manifest's file: relative paths of a spec start here."""

    @property
    def output(self) -> Path:
        """Below ``STATE/output``: for output of programs outside operations."""

    @property
    def memory(self) -> Path:
        """Below ``STATE/memory``: what the reconciler itself remembers of the key.

        It goes when the key goes; made by whoever writes to it first. Read-only in plan().
        """

    @property
    def causes(self) -> tuple[str, ...]:
        """Why this run happens; for logs, not for decisions."""

    @property
    def failures(self) -> int:
        """Failed runs in a row before this one."""

    @property
    def interrupted(self) -> RecoveringOperation | None:
        """In an observe() for a recovery: what was interrupted. None in every other call."""

    @property
    def stopping(self) -> bool:
        """True from the instant a stop begins: leave out what the next start would do anyway."""

    @property
    def critical_limit(self) -> float:
        """``stop.critical`` in seconds: a longer critical budget is refused."""

    @property
    def log(self) -> Any:
        """A bound structlog logger: ``request.log.info("motd.written", size=12)``."""

    def operation(self, name: str) -> AbstractAsyncContextManager[Operation]:
        """Open the operation *name*: durable before its body runs. One at a time a key."""

    def cleanup(self) -> AbstractAsyncContextManager[None]:
        """For awaiting in ``finally`` blocks: a small shielded budget after a cancellation.

        Never raises by itself; an overrun is logged.
        """


@attrs.frozen
class Change:
    """One thing that a plan says would be done, in words for a person."""

    action: str  # create, change, remove, run …
    what: str  # path, program, object
    detail: str = ""  # for example a unified diff


class Reconciler(abc.ABC, Generic[S]):
    """One instance serves all keys of one controller; runs of different keys overlap.

    kind      the manifest kind it takes; by default the name of its spec class
    Options   attrs class for the controller's ``options``; None: it takes none
    """

    kind: ClassVar[str]
    Options: ClassVar[type | None] = None

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @abc.abstractmethod
    async def reconcile(self, request: Request[S]) -> Result:
        """Observe, compare, and act inside operations. Cancelled like any trio code."""

    def budget(self, spec: S) -> float | None:  # noqa: ARG002 - for those that override it
        """The longest critical budget that *spec* asks for, in seconds; None: not known.

        It must fit ``stop.critical``: a manifest that asks for more is an invalid one.
        """
        return None

    async def observe(self, request: Request[S]) -> Observation | None:  # noqa: ARG002
        """What is there, without effects; may answer UNKNOWN. None: it cannot observe.

        Asked first of all when an operation was interrupted; raising counts as UNKNOWN.
        """
        return None

    def recover(
        self,
        interrupted: Interrupted,  # noqa: ARG002 - for those that override it
        observation: Observation | None,  # noqa: ARG002
    ) -> Decision | None:
        """What to do about an interrupted operation; a pure function of its arguments.

        None: no opinion, so that what was observed and the controller's policy decide.
        """
        return None

    def can_undo(self, spec: S) -> bool:  # noqa: ARG002
        """Whether undo() is there for *spec*: by default, whether the class has an undo()."""
        return hasattr(self, "undo")

    # Optional: remove(request), plan(request) -> list[Change], and undo(request, step), which
    # takes one step back; called for each step that may have had an effect, newest first, and
    # again if it was interrupted itself. A method that a class lacks is never called: without
    # remove() a key whose manifest went is only forgotten; without plan() its plan is shown as
    # unknown; without undo() nothing of it is rolled back.
