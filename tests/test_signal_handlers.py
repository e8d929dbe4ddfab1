"""The signal handlers: what they record, and from when on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import NoReturn

import pytest

from reconciled.signal_handlers import OTHER_SIGNALS, STOP_SIGNALS, SignalHandlers


class Exited(BaseException):
    """Raised in place of the end of the process."""


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_process(code: int) -> NoReturn:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", exit_process)


@pytest.fixture
def installed() -> Iterator[SignalHandlers]:
    """The real handlers; the previous ones are restored afterwards."""
    before = {
        number: signal.getsignal(number)
        for number in (*STOP_SIGNALS, *OTHER_SIGNALS, signal.SIGUSR1)
    }
    signals = SignalHandlers()
    signals.install()
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_during_the_start_exits(installed: SignalHandlers, number: int) -> None:
    """During the start nothing has to be ended: the process exits immediately with 0."""
    with pytest.raises(Exited) as exited:
        signal.raise_signal(number)
    assert exited.value.args == (0,)
    assert installed.stop_requested_at is None


def test_the_first_stop_signal_is_the_instant(installed: SignalHandlers) -> None:
    """Later ones are recorded in order, and do not change the instant."""
    woken = []
    installed.finish_start(lambda: woken.append(installed.stop_requested_at))
    signal.raise_signal(signal.SIGTERM)
    first = installed.stop_requested_at
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert first is not None
    assert installed.stop_requested_at == first
    seen = [number for number, _ in installed.received]
    assert seen == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    assert installed.received[0][1] == first
    # The instant is set before the wake-up, so the woken code finds it.
    assert woken == [first, first, first]


def test_a_burst_of_other_signals_is_recorded_once(installed: SignalHandlers) -> None:
    """Of SIGHUP, SIGUSR2 and SIGCHLD equal ones are recorded once; none begins a stop."""
    installed.finish_start(lambda: None)
    for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR2, signal.SIGHUP):
        signal.raise_signal(number)
    seen = [number for number, _ in installed.received]
    assert seen == [signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2]
    assert installed.stop_requested_at is None


def test_a_signal_during_the_start_is_kept(installed: SignalHandlers) -> None:
    """A SIGHUP during the start is kept, and wakes the loop once the start is complete."""
    woken = []
    signal.raise_signal(signal.SIGHUP)
    installed.finish_start(lambda: woken.append("woken"))
    assert woken == ["woken"]
    assert [number for number, _ in installed.received] == [signal.SIGHUP]


def test_ignore_stops(installed: SignalHandlers) -> None:
    """After ignore_stops() a stop signal has no effect, so a late one keeps the exit code."""
    installed.finish_start(lambda: None)
    installed.ignore_stops()
    for number in STOP_SIGNALS:
        signal.raise_signal(number)
    assert installed.stop_requested_at is None


def test_inherited_ignored_signals_are_handled(installed: SignalHandlers) -> None:
    """A signal that was inherited as ignored is handled once the handlers are installed."""
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    installed.install()
    installed.finish_start(lambda: None)
    signal.raise_signal(signal.SIGTERM)
    assert installed.stop_requested_at is not None
    assert signal.getsignal(signal.SIGCHLD) not in (signal.SIG_IGN, signal.SIG_DFL)


@pytest.mark.processes
def test_handlers_are_installed_before_heavy_imports() -> None:
    """The verb and its handlers import neither trio nor the configuration loader."""
    program = (
        "import sys, reconciled.cli.main, reconciled.cli.run\n"
        "heavy = {'trio', 'attrs', 'attr', 'yaml', 'structlog', 'sqlite3', 'httpx', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ran.stdout == "[]\n"
