"""Every exception that passes between modules, in one place.

    what a person wrote
    └── Invalid
    what code of a plugin raises or meets
    ├── Terminal
    ├── NotJournaled
    ├── Overrun
    ├── CriticalRefused
    ├── ProgramFailed
    └── SecretUnavailable
    the state directory and its store
    ├── StateRefused
    ├── StateLocked
    ├── StoreDamaged
    ├── StoreUnusable
    ├── StoreTooNew
    ├── StoreClosed
    └── WriteFailed
    operations, their programs and steps
    ├── OperationAlreadyOpen
    ├── OperationUnknown
    ├── OnceStepStarted
    ├── RecordDamaged
    ├── StepsDamaged
    └── StaleAttempt
    plugins
    ├── PluginNotFound
    ├── PluginBroken
    └── ContractBroken
    sockets, buses and threads
    ├── ListenRefused
    ├── NoDaemon
    ├── RequestNotDone
    ├── RequestRefused
    ├── MalformedMessage
    ├── DBusError
    ├── LogindUnreachable
    ├── NoThread
    └── DeviceChanged

An exception that only one module raises and catches is defined there, with an underscore. The
text of each is one line for a person: what is wrong, and what to do. They have no common base:
each is handled by name, where something can be done about it.
"""

from __future__ import annotations

import errno

TYPE_CHECKING = False  # ``reconciled step`` imports this, and typing itself takes 4 ms
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Protocol

    from reconciled.core.problems import Problem
    from reconciled.core.resources import Origin
    from reconciled.core.stages import Cut

    class ProgramExit(Protocol):
        """What ProgramFailed carries about the program; see reconciled.core.program_end.Ended."""

        @property
        def code(self) -> int | None:
            """The exit code; None: it was ended by a signal, or its status was lost."""

        @property
        def signal(self) -> int | None:
            """The signal that ended it."""

        @property
        def tail(self) -> tuple[str, ...]:
            """The last lines of its output."""


# -- what a person wrote -----------------------------------------------------------------------


class Invalid(Exception):
    """Invalid input; carries every problem found, sorted by origin."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, sorted(problems))))
        self.problems = sorted(problems)


# -- what code of a plugin raises or meets -----------------------------------------------------


class Terminal(Exception):
    """Raised by a reconciler: this spec can never succeed, so do not retry until it changes."""


class NotJournaled(Exception):
    """The intent could not be made durable: the operation must not start. str() says why."""


class Overrun(Exception):
    """A critical section was cut off: it exceeded its budget, or the hard limit of a stop."""

    def __init__(self, cut: Cut) -> None:
        super().__init__(str(cut))
        self.cut = cut


class CriticalRefused(RuntimeError):
    """A critical section was requested too late, where a cancellation cannot be delivered.

    Elsewhere a refusal *is* a cancellation: a retry loop would catch an exception and count it
    as a failure. Only inside a shield that is not a section's does it have to be an error.
    """


class ProgramFailed(Exception):
    """A program could not be started, or did not end with exit code 0.

    Its text is one line, fit for a log, and quotes the program's last lines.
    """

    def __init__(self, message: str, ended: ProgramExit | None = None) -> None:
        super().__init__(message)
        self.ended = ended  # None: it was never started


class SecretUnavailable(Exception):
    """A secret cannot be read: str() says which one, why, and what to write. One line."""


# -- the state directory and its store ---------------------------------------------------------


class StateRefused(Exception):
    """The state directory cannot be used: exit 78. str() says why and what to do."""


class StateLocked(Exception):
    """Another daemon holds the state directory: exit 75."""

    def __init__(self, state: Path, pid: int | None) -> None:
        who = "another process" if pid is None else f"process {pid}"
        super().__init__(f"{state} is locked by {who}: stop that daemon, or set another state:")
        self.pid = pid


class StoreDamaged(Exception):
    """The store differs from what was written. str() says where, for a person."""


class StoreUnusable(Exception):
    """The store cannot be opened or read. str() says why and what to do."""

    def __init__(self, store: Path, why: Exception | str) -> None:
        if isinstance(why, PermissionError):
            super().__init__(
                f"the store {store} cannot be read: permission denied: run as root, or as the "
                f"daemon's user"
            )
            return
        super().__init__(
            f"the store {store} cannot be used: {why}. Repair it, or move it away: the daemon "
            f"then starts without a record of what was applied, and removes nothing for it"
        )


class StoreTooNew(Exception):
    """The store was written by a newer program: exit 78. Nothing was touched."""

    def __init__(self, store: Path, found: int, known: int) -> None:
        super().__init__(
            f"the store {store} has schema {found}, and this version supports up to {known}: "
            f"install the newer version again"
        )


class StoreClosed(Exception):
    """The store accepts no more writes: the daemon is exiting."""


class WriteFailed(Exception):
    """A transaction could not be committed. str() says why.

    Nothing of it was applied, but after a failed sync the next start may find it in the store.
    """


# -- operations, their programs and steps ------------------------------------------------------


class OperationAlreadyOpen(Exception):
    """The key has an open operation already."""

    def __init__(self, key: str, name: str, operation: str) -> None:
        super().__init__(f"{key} has the open operation {name} ({operation})")
        self.operation = operation


class OperationUnknown(Exception):
    """There is no open operation with this id."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"there is no open operation {operation}")


class OnceStepStarted(Exception):
    """A ONCE step was started: the journal never restarts its operation from the first step."""

    def __init__(self, name: str, operation: str, step: str) -> None:
        super().__init__(
            f"{name} ({operation}) cannot restart from its first step: step {step}, which must run"
            f" only once, was started"
        )


class RecordDamaged(Exception):
    """A record exists and cannot be read: nothing can be concluded from it."""


class StepsDamaged(Exception):
    """A line before the last is bad: which steps were done is unknown."""


class StaleAttempt(Exception):
    """The attempt is not, or no longer, the current one of its operation."""


# -- plugins -----------------------------------------------------------------------------------


class PluginNotFound(Exception):
    """No such reconciler; the message names the one that was probably meant."""


class PluginBroken(Exception):
    """A reconciler that exists and cannot be used: why, and where the fault is."""

    def __init__(self, name: str, reason: str, origin: Origin) -> None:
        super().__init__(f"{origin}: reconciler {name} cannot be used: {reason}")
        self.name = name
        self.reason = reason
        self.origin = origin


class ContractBroken(Exception):
    """A plugin class that cannot be used; str() says why, and what to write."""


# -- sockets, buses and threads ----------------------------------------------------------------


class ListenRefused(Exception):
    """A listener cannot be opened; the message says why, and what to do."""

    @property
    def in_use(self) -> bool:
        """Whether another process listens there, which may be temporary."""
        return isinstance(self.__cause__, OSError) and self.__cause__.errno == errno.EADDRINUSE


class NoDaemon(Exception):
    """No daemon answers; the message says at which socket, and with which error."""


class RequestNotDone(Exception):
    """A request was not carried out, or could not be sent; the message says why."""


class RequestRefused(Exception):
    """The daemon refuses a request; the message says why."""


class MalformedMessage(Exception):
    """A line that does not follow the protocol; the message says what is wrong with it."""


class DBusError(Exception):
    """A D-Bus call was answered with an error: its name, and its text where it has one."""

    def __init__(self, name: str, text: str = "") -> None:
        super().__init__(text or name)
        self.name = name
        self.text = text


class LogindUnreachable(Exception):
    """logind's lock cannot be taken now; the message says what is wrong, and what to do."""


class NoThread(OSError):
    """No thread could be started in time; nothing was run. The message says what helps."""


class DeviceChanged(OSError):
    """The directory's path is on another device than before."""
