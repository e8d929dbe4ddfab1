"""The instant of a stop: what the handlers note, and from when on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import NoReturn

import pytest

from reconciled.signal_handlers import OTHER_SIGNALS, STOP_SIGNALS, SignalHandlers


class Left(BaseException):
    """In place of the end of the process."""


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)


@pytest.fixture
def installed() -> Iterator[SignalHandlers]:
    """Real handlers, and afterwards those of before."""
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
def test_before_the_start_is_over_a_stop_just_ends(installed: SignalHandlers, number: int) -> None:
    """Nothing has begun that would have to end: the process leaves at once, with 0."""
    with pytest.raises(Left) as left:
        signal.raise_signal(number)
    assert left.value.args == (0,)
    assert installed.stop_requested_at is None


def test_the_first_stop_signal_is_the_instant(installed: SignalHandlers) -> None:
    """Later ones are kept in order, and do not move the instant."""
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
    # The flag stands before anybody is woken: whoever looks then sees it.
    assert woken == [first, first, first]


def test_a_burst_of_others_is_one(installed: SignalHandlers) -> None:
    """What SIGHUP, SIGUSR2 and SIGCHLD ask for is done once, after the last; none is a stop."""
    installed.finish_start(lambda: None)
    for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR2, signal.SIGHUP):
        signal.raise_signal(number)
    seen = [number for number, _ in installed.received]
    assert seen == [signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2]
    assert installed.stop_requested_at is None


def test_what_came_during_the_start_waits(installed: SignalHandlers) -> None:
    """A reload that is asked for during the start is kept, and told as soon as somebody listens."""
    woken = []
    signal.raise_signal(signal.SIGHUP)
    installed.finish_start(lambda: woken.append("woken"))
    assert woken == ["woken"]
    assert [number for number, _ in installed.received] == [signal.SIGHUP]


def test_at_the_very_end_a_stop_changes_nothing(installed: SignalHandlers) -> None:
    """A late signal must not change the exit code."""
    installed.finish_start(lambda: None)
    installed.ignore_stops()
    for number in STOP_SIGNALS:
        signal.raise_signal(number)
    assert installed.stop_requested_at is None


def test_an_ignored_signal_is_taken_over(installed: SignalHandlers) -> None:
    """What a parent ignored is handled again once the handlers are installed anew."""
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    installed.install()
    installed.finish_start(lambda: None)
    signal.raise_signal(signal.SIGTERM)
    assert installed.stop_requested_at is not None
    assert signal.getsignal(signal.SIGCHLD) not in (signal.SIG_IGN, signal.SIG_DFL)


@pytest.mark.processes
def test_handlers_are_in_place_before_anything_heavy() -> None:
    """The verb and its handlers load neither trio nor a reader of configuration."""
    program = (
        "import sys, reconciled.cli.main, reconciled.cli.run\n"
        "heavy = {'trio', 'attrs', 'attr', 'yaml', 'structlog', 'sqlite3', 'httpx', 'asyncio'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ran.stdout == "[]\n"
