"""The journal's native protocol: encoding, and delivery while journald is stopped."""

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
    """A journal that listens, and reads only on request."""
    receiver = Receiver(tmp_path / "socket")
    yield receiver
    with contextlib.suppress(OSError):
        receiver.close()


@pytest.fixture
def sink(receiver: Receiver) -> Iterator[Sink]:
    """A sink to the receiver that buffers a hundred records."""
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
    """The datagrams received until *enough* holds, for 10 s at most."""
    got: list[bytes] = []
    with trio.fail_after(10):
        while not got or not enough(got):
            await trio.lowlevel.wait_readable(receiver._socket)
            got += receiver.datagrams()
    return got


# -- encoding ------------------------------------------------------------------------------


def test_an_entry_has_a_message_and_a_field_for_each_value(receiver: Receiver, logs: Logs) -> None:
    """A line is one readable message, and each field but None can be matched."""
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


def test_a_traceback_follows_its_message(receiver: Receiver, logs: Logs) -> None:
    """A traceback is a field of several lines, and a part of the message."""
    try:
        raise FileNotFoundError(errno.ENOENT, "\x9b2Jlost", "/x")
    except FileNotFoundError:
        logs.log.exception("plugin.failed", reason="a fault")
    (entry,) = receiver.entries()
    (traceback,), (message,) = entry["TRACEBACK"], entry["MESSAGE"]
    assert traceback.startswith("Traceback (most recent call last):\n")
    head, *rows = message.split("\n")
    assert head.startswith("plugin.failed: a fault: [Errno 2] \\x9b2Jlost: '/x' (")
    expected = traceback.replace("\x9b", "\\x9b").splitlines()
    assert [row.removeprefix("  ").replace("\\\\", "\\") for row in rows] == expected
    assert entry["ERRNO"] == [str(errno.ENOENT)]


def test_commands_are_listed_on_separate_lines(receiver: Receiver, logs: Logs) -> None:
    """Each command is on its own line; a long value is cut in the message only."""
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
def test_no_value_can_end_or_forge_a_field(fields: dict[str, Any], event: str) -> None:
    """For any names and values journald parses exactly the given fields."""
    entry = decoded(JournaldRenderer()("", "info", event, fields))
    assert entry["RECONCILED_EVENT"][0].encode() == event.encode("utf-8", "backslashreplace")
    expected = {field_name(name) for name, value in fields.items() if value is not None}
    always = {"MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "RECONCILED_EVENT"}
    assert set(entry) - {"MESSAGE_ID"} == expected | always
    for name, value in fields.items():
        if isinstance(value, str):
            assert value in entry[field_name(name)]
    first, *rows = entry["MESSAGE"][0].split("\n")
    assert not any(unicodedata.category(each) == "Cc" for each in "".join([first, *rows]))
    # The rows below it are indented, so that none looks like an entry.
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
def test_field_names_are_valid_for_the_journal(name: str, known: str) -> None:
    """Field names consist of capitals, digits and _, and are at most 64 characters long."""
    assert field_name(name) == known


def test_a_large_record_is_sent_in_a_sealed_file(receiver: Receiver, sink: Sink) -> None:
    """A record of three megabytes is sent in a memory file that no process can change."""
    record = os.urandom(3_000_000)
    sink.write(b"before")
    sink.write(record)
    sink.write(b"after")
    assert receiver.datagrams() == [b"before", record, b"after"]
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    assert receiver.seals == [seals]
    assert sink.statistics().written == 3


# -- delivery while journald is stopped -----------------------------------------------------------


async def test_a_stopped_journal_does_not_block(receiver: Receiver, sink: Sink) -> None:
    """A full queue never blocks; later records are in order, with the number of lost ones."""
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


async def test_a_restarted_journal_gets_the_waiting_records(receiver: Receiver, sink: Sink) -> None:
    """Records logged while there is no journal wait until there is one."""
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


def test_a_record_reaches_a_restarted_journal_at_once(receiver: Receiver, sink: Sink) -> None:
    """The first record after a restart of the journal is sent when write() returns."""
    receiver.close()
    receiver.open()
    sink.write(b"0")
    assert receiver.datagrams() == [b"0"]


def test_close_is_bounded_and_does_not_spin(receiver: Receiver, sink: Sink) -> None:
    """close() waits for a stopped journal until its timeout, without a busy loop."""
    receiver.close()
    sink.write(b"0")
    wall, cpu = time.monotonic(), time.thread_time()
    sink.close(0.3)
    assert 0.2 < time.monotonic() - wall < 5
    assert time.thread_time() - cpu < 0.2
    assert sink.statistics().dropped == 1


@attrs.define(eq=False)
class Selective:
    """Accepts a record (True), would block (False), or fails for it (None), by its script."""

    script: list[bool | None]
    got: list[bytes] = attrs.field(factory=list)
    fd: int = -1
    is_terminal: bool = False

    def write(self, data: bytes) -> int:
        accepts = self.script.pop(0) if self.script else True
        if accepts is None:
            raise OSError(errno.ENOMEM, "no memory for it")
        if accepts:
            self.got.append(data)
        return len(data) if accepts else 0

    def close(self) -> None:
        """Nothing is open."""


def test_a_record_that_cannot_be_sent_is_dropped_alone() -> None:
    """A record that fails is dropped, counted and announced; later ones are sent."""
    descriptor = Selective([False, False, False, True, None, True])
    sink = Sink(descriptor, announce, datagrams=True)
    fill(sink, 3)
    sink._flush()
    sink._flush()
    assert descriptor.got == [b"0", b"2", b"dropped 1"]
    assert sink.statistics().dropped == 1


def test_a_flush_is_bounded() -> None:
    """One flush writes 500 records at most, so that the event loop runs other tasks."""
    descriptor = Selective([False] * 1200)
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
    """Records are in order, never joined, and lost ones are announced at their position."""
    descriptor = Selective(list(script))
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
    announced = [int(record[8:]) for record in descriptor.got if not record.isdigit()]
    assert len(numbers) == now.written
    assert sum(announced) == now.dropped
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
def test_the_identifier_names_the_instance(directory: str | None, identifier: str) -> None:
    """``journalctl -t`` finds the entries of an instance under the name of its unit."""
    environment = {"RUNTIME_DIRECTORY": directory} if directory else {}
    assert syslog_identifier(environment) == identifier
    entry = decoded(JournaldRenderer(identifier)("", "info", "a.b", {}))
    assert entry["SYSLOG_IDENTIFIER"] == [identifier]


# -- selection of the journal ---------------------------------------------------------------------


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
    """Style auto is the journal only if the manager connected standard error to it."""
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
    """Style auto falls back to JSON, without a warning, if the journal cannot be reached."""
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
    """Standard error, not the socket of the journal, is the descriptor for faulthandler."""
    assert logs.sink.fileno() == 2


def test_log_from_thread_keeps_the_order(receiver: Receiver, logs: Logs) -> None:
    """Lines of the last resort follow earlier ones, also after a restart of the journal."""
    receiver.close()
    logs.log.critical("daemon.crashed", reason="a fault")
    assert logs.log_from_thread("error", "stop.ended", exit_code=1)
    receiver.open()
    logs.close()
    events = [entry["RECONCILED_EVENT"] for entry in receiver.entries()]
    assert events == [["daemon.crashed"], ["stop.ended"]]


def test_lines_lost_at_the_end_are_counted_on_standard_error(receiver: Receiver) -> None:
    """If the journal is stopped until the end, the count is written to standard error."""
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


def test_standard_error_is_empty_without_a_loss(receiver: Receiver) -> None:
    """Nothing is written to standard error if the journal received all lines."""
    reader, writer = os.pipe()
    logs = configure("journal", descriptor=writer, journal=str(receiver.path), environment={})
    logs.log.info("a.b")
    logs.close()
    os.close(writer)
    assert len(receiver.entries()) == 1
    assert os.read(reader, 1000) == b""
    os.close(reader)
