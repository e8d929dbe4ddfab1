"""The journal's native protocol: what is sent, and that nothing is lost while nobody listens."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from journal_receiver import Receiver, decoded

from reconciled.observe.journald import (
    JournaldRenderer,
    field_name,
    open_journald,
    syslog_identifier,
)
from reconciled.observe.logs import Logs, configure
from reconciled.observe.sink import Sink


def announce(count: int) -> bytes:
    return f"dropped {count}".encode()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    """A journal that listens, and reads nothing by itself."""
    receiver = Receiver(tmp_path / "socket")
    yield receiver
    with contextlib.suppress(OSError):
        receiver.close()


@pytest.fixture
def sink(receiver: Receiver) -> Iterator[Sink]:
    """A sink that leads to the receiver and holds a hundred records."""
    opened = open_journald({}, 2, force=True, path=str(receiver.path))
    assert opened is not None
    sink = Sink(opened, announce, max_lines=100, datagrams=True)
    yield sink
    sink.close(0)


@pytest.fixture
def logs(receiver: Receiver) -> Iterator[Logs]:
    """The log in format journal, at the receiver."""
    logs = configure("journal", journal=str(receiver.path), environment={})
    yield logs
    logs.close()


def fill(sink: Sink, count: int) -> None:
    for number in range(count):
        sink.write(f"{number}".encode())


async def received(receiver: Receiver, enough: Callable[[list[bytes]], bool]) -> list[bytes]:
    """What comes until it is *enough*, within a bound."""
    got: list[bytes] = []
    with trio.fail_after(10):
        while not got or not enough(got):
            await trio.lowlevel.wait_readable(receiver._socket)
            got += receiver.datagrams()
    return got


# -- what is sent ------------------------------------------------------------------------------


def test_an_entry_for_people_and_for_queries(receiver: Receiver, logs: Logs) -> None:
    """A line is one readable message, and each of its fields can be looked for; None is none."""
    logs.log.bind(run=7, key="site/a").error(
        "operation.cut", reason="no end", task="up", held=None, spent_s=1.5, done=False, at=["x"]
    )
    (entry,) = receiver.entries()
    assert len(entry.pop("MESSAGE_ID")[0]) == 32
    assert entry == {
        "MESSAGE": ['operation.cut site/a: no end (run=7 task=up spent_s=1.5 done=false at=["x"])'],
        "PRIORITY": ["3"],
        "SYSLOG_IDENTIFIER": ["reconciled"],
        "RECONCILED_EVENT": ["operation.cut"],
        "RECONCILED_KEY": ["site/a"],
        "RECONCILED_RUN": ["7"],
        "RECONCILED_REASON": ["no end"],
        "RECONCILED_TASK": ["up"],
        "RECONCILED_SPENT_S": ["1.5"],
        "RECONCILED_DONE": ["false"],
        "RECONCILED_AT": ['["x"]'],
    }


def test_a_traceback_stands_below_its_message(receiver: Receiver, logs: Logs) -> None:
    """A traceback is a field of several lines, and the message shows it as well."""
    try:
        raise FileNotFoundError(errno.ENOENT, "\x9b2Jgone", "/x")
    except FileNotFoundError:
        logs.log.exception("plugin.failed", reason="a fault")
    (entry,) = receiver.entries()
    (traceback,), (message,) = entry["TRACEBACK"], entry["MESSAGE"]
    assert traceback.startswith("Traceback (most recent call last):\n")
    head, *rows = message.split("\n")
    assert head.startswith("plugin.failed: a fault: [Errno 2] \\x9b2Jgone: '/x' (")
    told = traceback.replace("\x9b", "\\x9b").splitlines()
    assert [row.removeprefix("  ").replace("\\\\", "\\") for row in rows] == told
    assert entry["ERRNO"] == [str(errno.ENOENT)]


def test_what_is_to_be_copied_stands_on_lines_of_its_own(receiver: Receiver, logs: Logs) -> None:
    """Commands and places in the code are one a line; a long value is cut in the message alone."""
    commands = ["do this", "or that"]
    logs.log.error("operation.held", reason="why", commands=commands, output="x" * 500)
    (entry,) = receiver.entries()
    head, *rows = entry["MESSAGE"][0].split("\n")
    assert head == f"operation.held: why (output={'x' * 200}…)"
    assert rows == ["  commands: do this", "  commands: or that"]
    assert entry["RECONCILED_OUTPUT"] == ["x" * 500]
    assert entry["RECONCILED_COMMANDS"] == ['["do this","or that"]']


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(fields=st.dictionaries(st.text(min_size=1), plain_values, max_size=6), event=st.text())
def test_no_value_ends_its_field_or_begins_one(fields: dict[str, Any], event: str) -> None:
    """Whatever stands in values and names, the journal reads the fields that were meant."""
    entry = decoded(JournaldRenderer()("", "info", event, fields))
    assert entry["RECONCILED_EVENT"][0].encode() == event.encode("utf-8", "backslashreplace")
    told = {field_name(name) for name, value in fields.items() if value is not None}
    always = {"MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "RECONCILED_EVENT"}
    assert set(entry) - {"MESSAGE_ID"} == told | always
    for name, value in fields.items():
        if isinstance(value, str):
            assert value in entry[field_name(name)]
    first, *rows = entry["MESSAGE"][0].split("\n")
    assert not any(unicodedata.category(each) == "Cc" for each in "".join([first, *rows]))
    # What stands below it is set in: nothing looks like a line of its own.
    assert all(row.startswith("  ") for row in rows)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("operation", "RECONCILED_OPERATION"),
        ("a-b.c é", "RECONCILED_A_B_C__"),
        ("x" * 100, "RECONCILED_" + "X" * 53),
        ("traceback", "TRACEBACK"),
        ("errno", "ERRNO"),
    ],
)
def test_names_are_those_that_the_journal_takes(name: str, known: str) -> None:
    """The journal drops fields with other than capitals, digits and _, and with long names."""
    assert field_name(name) == known


def test_what_is_too_large_goes_in_a_sealed_file(receiver: Receiver, sink: Sink) -> None:
    """Three megabytes are one record, and nobody can change them while the journal reads."""
    record = os.urandom(3_000_000)
    sink.write(b"before")
    sink.write(record)
    sink.write(b"after")
    assert receiver.datagrams() == [b"before", record, b"after"]
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    assert receiver.seals == [seals]
    assert sink.statistics().written == 3


# -- a journal that does not listen ---------------------------------------------------------------


async def test_a_stopped_journal_costs_no_time_and_no_order(receiver: Receiver, sink: Sink) -> None:
    """A full queue never blocks; what comes later is in order, and says how much is missing."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.flush_forever)
        await trio.testing.wait_all_tasks_blocked()
        fill(sink, 1000)
        before = sink.statistics()
        assert before.waiting == 100
        assert before.dropped == 1000 - before.written - 100
        got = await received(receiver, lambda got: got[-1].startswith(b"dropped"))
        nursery.cancel_scope.cancel(reason="seen")
    kept = before.written + before.waiting
    assert [int(record) for record in got[:-1]] == list(range(kept))
    assert got[-1] == b"dropped %d" % before.dropped


async def test_a_journal_made_anew_gets_the_rest(receiver: Receiver, sink: Sink) -> None:
    """Records that come while there is no journal at all wait until there is one again."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.flush_forever)
        sink.write(b"0")
        assert receiver.datagrams() == [b"0"]
        receiver.close()
        for number in range(1, 50):
            sink.write(b"%d" % number)
        await trio.testing.wait_all_tasks_blocked()
        assert sink.statistics().waiting == 49
        receiver.open()
        got = await received(receiver, lambda got: len(got) == 49)
        nursery.cancel_scope.cancel(reason="seen")
    assert [int(record) for record in got] == list(range(1, 50))
    assert sink.statistics().dropped == 0


def test_a_record_finds_a_new_journal_by_itself(receiver: Receiver, sink: Sink) -> None:
    """The first record after the journal was made anew is out when write() returns."""
    receiver.close()
    receiver.open()
    sink.write(b"0")
    assert receiver.datagrams() == [b"0"]


def test_close_is_bounded_and_does_not_spin(receiver: Receiver, sink: Sink) -> None:
    """close() gives a journal that does not come back its time, and the processor rest."""
    receiver.close()
    sink.write(b"0")
    wall, cpu = time.monotonic(), time.thread_time()
    sink.close(0.3)
    assert 0.2 < time.monotonic() - wall < 5
    assert time.thread_time() - cpu < 0.2
    assert sink.statistics().dropped == 1


@attrs.define(eq=False)
class Choosy:
    """Takes the records that the script says: True; False: not now; None: never this one."""

    script: list[bool | None]
    got: list[bytes] = attrs.field(factory=list)
    number: int = -1
    terminal: bool = False

    def write(self, data: bytes) -> int:
        takes = self.script.pop(0) if self.script else True
        if takes is None:
            raise OSError(errno.ENOMEM, "no memory for it")
        if takes:
            self.got.append(data)
        return len(data) if takes else 0

    def close(self) -> None:
        """Nothing is open."""


def test_what_cannot_be_sent_takes_nothing_along() -> None:
    """A record that is refused is dropped, counted and told; those behind it are sent."""
    descriptor = Choosy([False, False, False, True, None, True])
    sink = Sink(descriptor, announce, datagrams=True)
    fill(sink, 3)
    sink._flush()
    sink._flush()
    assert descriptor.got == [b"0", b"2", b"dropped 1"]
    assert sink.statistics().dropped == 1


def test_what_waited_goes_out_in_turns() -> None:
    """Thousands of records do not go out in a row: the event loop has other things to do."""
    descriptor = Choosy([False] * 1200)
    sink = Sink(descriptor, announce, datagrams=True)
    fill(sink, 1200)
    assert sink._flush()
    assert 0 < len(descriptor.got) <= 500
    sink._flush()
    sink._flush()
    assert [int(record) for record in descriptor.got] == list(range(1200))


@given(
    script=st.lists(st.sampled_from([True, False, None]), max_size=60),
    max_lines=st.integers(1, 10),
    count=st.integers(0, 60),
)
def test_every_record_is_written_waiting_or_dropped(
    script: list[bool | None], max_lines: int, count: int
) -> None:
    """Order is kept, no two records are joined, and what is missing is told where it is missing."""
    descriptor = Choosy(list(script))
    sink = Sink(descriptor, announce, max_lines=max_lines, datagrams=True)
    for number in range(count):
        sink.write(b"%d" % number)
        now = sink.statistics()
        assert now.written + now.waiting + now.dropped == number + 1
        assert len(sink._waiting) <= max_lines + 1
    descriptor.script.clear()
    sink._flush()
    now = sink.statistics()
    assert now.waiting == 0
    numbers = [int(record) for record in descriptor.got if record.isdigit()]
    told = [int(record[8:]) for record in descriptor.got if not record.isdigit()]
    assert len(numbers) == now.written
    assert sum(told) == now.dropped
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("directory", "identifier"),
    [
        (None, "reconciled"),
        ("/run/reconciled", "reconciled"),
        ("/run/reconciled-web", "reconciled-web"),
        ("/run/reconciled-web:/run/other", "reconciled-web"),
        ("/run/site", "reconciled"),
    ],
)
def test_an_instance_has_a_name_of_its_own(directory: str | None, identifier: str) -> None:
    """Entries of an instance are found by ``journalctl -t`` as its standard error is."""
    environment = {"RUNTIME_DIRECTORY": directory} if directory else {}
    assert syslog_identifier(environment) == identifier
    entry = decoded(JournaldRenderer(identifier)("", "info", "a.b", {}))
    assert entry["SYSLOG_IDENTIFIER"] == [identifier]


# -- when it is chosen ----------------------------------------------------------------------------


def _stream(descriptor: int) -> str:
    status = os.fstat(descriptor)
    return f"{status.st_dev}:{status.st_ino}"


@pytest.mark.parametrize(
    ("style", "stream", "entries"),
    [
        ("auto", _stream, 1),
        ("auto", lambda _: "8:42", 0),
        ("json", _stream, 0),
        ("text", _stream, 0),
        ("journal", lambda _: "8:42", 1),
    ],
)
def test_when_the_journal_is_chosen(
    receiver: Receiver, style: str, stream: Callable[[int], str], entries: int
) -> None:
    """Auto is the journal only where the manager connected standard error to it."""
    reader, writer = os.pipe()
    environment = {"JOURNAL_STREAM": stream(writer)}
    logs = configure(style, descriptor=writer, journal=str(receiver.path), environment=environment)
    logs.log.info("a.b")
    assert len(receiver.entries()) == entries
    logs.close()
    os.close(writer)
    assert bool(os.read(reader, 100)) != bool(entries)
    os.close(reader)


def test_auto_without_a_journal_is_json(tmp_path: Path) -> None:
    """A journal that cannot be reached, from a container say, costs auto not even a warning."""
    reader, writer = os.pipe()
    environment = {"JOURNAL_STREAM": _stream(writer)}
    logs = configure(
        "auto", descriptor=writer, journal=str(tmp_path / "none"), environment=environment
    )
    logs.log.info("a.b")
    logs.close()
    os.close(writer)
    assert os.read(reader, 1000).endswith(b'"event":"a.b"}\n')
    os.close(reader)


def test_stacks_go_to_standard_error(logs: Logs) -> None:
    """What faulthandler writes by itself is no entry of the journal's protocol."""
    assert logs.sink.fileno() == 2


def test_last_words_come_after_what_was_said_before(receiver: Receiver, logs: Logs) -> None:
    """The end of a process keeps the order also where the journal was gone meanwhile."""
    receiver.close()
    logs.log.critical("daemon.crashed", reason="a fault")
    assert logs.log_from_thread("error", "stop.ended", exit_code=1)
    receiver.open()
    logs.close()
    events = [entry["RECONCILED_EVENT"] for entry in receiver.entries()]
    assert events == [["daemon.crashed"], ["stop.ended"]]


def test_what_is_missing_at_the_end_is_told_on_standard_error(receiver: Receiver) -> None:
    """A journal that takes nothing to the end finds the count where it reads standard error."""
    reader, writer = os.pipe()
    logs = configure("journal", descriptor=writer, journal=str(receiver.path), environment={})
    for number in range(50):
        logs.log.info("a.b", number=number)
    logs.close(0)
    os.close(writer)
    missing = 50 - len(receiver.entries())
    assert 0 < missing < 50
    assert os.read(reader, 1000) == f"<4>log.dropped (count={missing})\n".encode()
    os.close(reader)


def test_nothing_is_told_where_nothing_is_missing(receiver: Receiver) -> None:
    """Standard error stays empty while the journal takes all."""
    reader, writer = os.pipe()
    logs = configure("journal", descriptor=writer, journal=str(receiver.path), environment={})
    logs.log.info("a.b")
    logs.close()
    os.close(writer)
    assert len(receiver.entries()) == 1
    assert os.read(reader, 1000) == b""
    os.close(reader)
