"""The sink: ordered, bounded, and never blocked by its reader."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from hypothesis import assume, given
from hypothesis import strategies as st

from reconciled.observe.output_descriptor import open_descriptor
from reconciled.observe.sink import Sink


def announce(count: int) -> bytes:
    return f"dropped {count} lines\n".encode()


@attrs.define(eq=False)
class Scripted:
    """A descriptor that accepts as many bytes as the script says; None: EPIPE."""

    script: list[int | None]
    got: bytearray = attrs.field(factory=bytearray)
    # A line lost only its newline: it looks like a whole one, and counts as dropped.
    ambiguous: bool = False
    fd: int = -1
    is_terminal: bool = False

    def write(self, data: bytes) -> int:
        room = self.script.pop(0) if self.script else len(data)
        if room is None:
            self.ambiguous |= self.got.endswith((b" whole", b" lines"))
            raise BrokenPipeError
        self.got += data[:room]
        return min(room, len(data))

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A blocking pipe, as a shell passes one."""
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(end)


def fill(sink: Sink, lines: int, width: int = 100) -> None:
    for number in range(lines):
        sink.write(f"{number:0{width}}\n".encode())


def read_all(reader: int) -> bytes:
    """All bytes until the writers have closed."""
    parts = []
    while part := os.read(reader, 65536):
        parts.append(part)
    return b"".join(parts)


def test_a_line_is_written_when_write_returns(pipe: tuple[int, int]) -> None:
    """While the reader keeps up, a line is in the kernel before write() returns."""
    reader, writer = pipe
    sink = Sink(open_descriptor(writer), announce)
    sink.write(b"one\n")
    assert os.read(reader, 100) == b"one\n"


def test_a_stalled_reader_does_not_block(pipe: tuple[int, int]) -> None:
    """A full pipe never blocks; later the lines are in order, with the loss at its position."""
    reader, writer = pipe
    sink = Sink(open_descriptor(writer), announce, max_lines=100)
    fill(sink, 2000)
    before = sink.statistics()
    assert before.waiting == 100
    assert before.dropped == 2000 - before.written - 100
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(read_all(reader)))
    thread.start()
    sink.close(5)
    os.close(writer)
    thread.join()
    lines = got[0].decode().splitlines()
    kept = before.written + before.waiting
    assert [int(line) for line in lines[:kept]] == list(range(kept))
    assert lines[kept:] == [f"dropped {before.dropped} lines"]


async def test_the_flusher_writes_when_the_reader_returns(pipe: tuple[int, int]) -> None:
    """flush_forever() writes waiting lines and announces dropped ones without a further line."""
    reader, writer = pipe
    sink = Sink(open_descriptor(writer), announce, max_lines=50)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.flush_forever)
        await trio.testing.wait_all_tasks_blocked()
        fill(sink, 2000)
        got = b""
        os.set_blocking(reader, False)
        while b" lines\n" not in got:
            await trio.lowlevel.wait_readable(reader)
            got += os.read(reader, 65536)
        assert sink.statistics().waiting == 0
        nursery.cancel_scope.cancel(reason="seen")
    count = 2000 - sink.statistics().dropped
    assert got.decode().splitlines()[-1] == f"dropped {2000 - count} lines"


async def test_a_line_from_a_thread_wakes_the_flusher(pipe: tuple[int, int]) -> None:
    """A line that a thread buffers is written although the loop is idle."""
    reader, writer = pipe
    sink = Sink(open_descriptor(writer), announce)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sink.flush_forever)
        await trio.testing.wait_all_tasks_blocked()
        await trio.to_thread.run_sync(lambda: fill(sink, 1000))
        assert sink.statistics().waiting
        got = b""
        os.set_blocking(reader, False)
        while got.count(b"\n") < 1000:
            await trio.lowlevel.wait_readable(reader)
            got += os.read(reader, 65536)
        nursery.cancel_scope.cancel(reason="seen")


def test_the_shared_description_stays_blocking(pipe: tuple[int, int]) -> None:
    """The flags of an inherited descriptor, which other processes share, are never changed."""
    _, writer = pipe
    ours, theirs = socket.socketpair()
    master, slave = pty.openpty()
    for descriptor in (writer, theirs.fileno(), slave):
        sink = Sink(open_descriptor(descriptor), announce, max_lines=10)
        fill(sink, 5000)
        assert sink.statistics().waiting
        assert os.get_blocking(descriptor)
        sink.close(0)
    os.close(master)
    os.close(slave)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal"])
def test_close_is_bounded(kind: str) -> None:
    """close() waits for a reader that never reads no longer than its timeout."""
    if kind == "pipe":
        ends = os.pipe()
    elif kind == "socket":
        first, second = socket.socketpair()
        ends = (first.detach(), second.detach())
    else:
        ends = pty.openpty()
    sink = Sink(open_descriptor(ends[1]), announce)
    fill(sink, 6000)
    assert sink.statistics().waiting
    start = time.monotonic()
    sink.close(0.2)
    assert 0.1 < time.monotonic() - start < 5
    assert sink.statistics().waiting == 0
    for end in ends:
        os.close(end)


def test_the_poll_fallback_never_blocks(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a pipe cannot be reopened, poll() prevents a blocking write."""
    reader, writer = pipe
    monkeypatch.setattr("reconciled.observe.output_descriptor._reopen", lambda *_: None)
    sink = Sink(open_descriptor(writer), announce, max_lines=100)
    fill(sink, 2000)
    assert sink.statistics().waiting == 100
    assert os.read(reader, 101) == b"0" * 100 + b"\n"


def test_a_terminal_is_recognised() -> None:
    """A terminal is recognised, and reopened without becoming the controlling one."""
    master, slave = pty.openpty()
    sink = Sink(open_descriptor(slave), announce)
    assert sink.is_terminal
    sink.write(b"hello\n")
    assert os.read(master, 100) == b"hello\r\n"
    sink.close(0)
    os.close(slave)
    os.close(master)


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    """A regular file is written through the given descriptor, in append mode."""
    path = tmp_path / "log"
    path.write_text("before\n")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    sink = Sink(open_descriptor(descriptor), announce)
    sink.write(b"one\n")
    with path.open("a") as other:
        other.write("other\n")
    sink.write(b"two\n")
    sink.close(1)
    os.close(descriptor)
    assert path.read_text() == "before\none\nother\ntwo\n"


def test_lines_to_a_closed_reader_are_counted(pipe: tuple[int, int]) -> None:
    """EPIPE is never raised: lines are dropped and counted."""
    reader, writer = pipe
    sink = Sink(open_descriptor(writer), announce)
    os.close(reader)
    fill(sink, 10)
    sink.close(0.2)
    sink.write(b"late\n")
    assert sink.statistics().dropped == 11


def test_lines_to_a_closed_descriptor_are_counted() -> None:
    """A daemon started without standard error runs, and counts the dropped lines."""
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    sink = Sink(open_descriptor(writer), announce)
    fill(sink, 3)
    sink.close(0.2)
    assert repr(sink) == "<Sink written=0 waiting=0 dropped=3>"


def test_a_line_after_a_torn_one_starts_on_a_new_line() -> None:
    """After a line that was cut by an error the next one starts on a new line."""
    descriptor = Scripted([3, None])
    sink = Sink(descriptor, announce)
    sink.write(b"first\n")
    sink.write(b"second\n")
    sink.write(b"third\n")
    assert descriptor.got == b"fir\ndropped 1 lines\nsecond\nthird\n"


def test_a_lost_announcement_is_repeated() -> None:
    """The lines of an announcement that was dropped are announced again."""
    descriptor = Scripted([None, None, None])
    sink = Sink(descriptor, announce)
    fill(sink, 3, width=1)
    sink.write(b"seen\n")
    assert descriptor.got == b"dropped 3 lines\nseen\n"


def test_a_line_logged_during_a_write_follows_it() -> None:
    """Code that logs while its own thread holds the lock does not deadlock or tear a line."""

    class Interrupted(Scripted):
        def write(self, data: bytes) -> int:
            if data == b"outer\n":
                sink.write(b"inner\n")
                assert sink.write_from_thread(b"inner too\n")
            return super().write(data)

    descriptor = Interrupted([])
    sink = Sink(descriptor, announce)
    sink.write(b"outer\n")
    assert descriptor.got == b"outer\ninner\ninner too\n"
    assert sink.statistics().written == 3


def test_the_last_resort_gives_up_on_a_hung_holder() -> None:
    """write_from_thread() and close() give up on a lock whose holder hangs."""
    sink = Sink(Scripted([]), announce)
    held, release = threading.Event(), threading.Event()

    def hang() -> None:
        with sink._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    held.wait()
    assert not sink.write_from_thread(b"line\n")
    sink.close(0.01)
    release.set()
    thread.join()


def test_threads_can_share_a_sink() -> None:
    """Lines of several threads are never mixed, and those of each stay in order."""
    reader, writer = os.pipe()
    sink = Sink(open_descriptor(writer), announce)
    got: list[bytes] = []
    read = threading.Thread(target=lambda: got.append(read_all(reader)))
    read.start()

    def write_lines(name: int) -> None:
        for number in range(500):
            sink.write(f"{name} {number} {'x' * 200}\n".encode())

    threads = [threading.Thread(target=write_lines, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close(5)
    os.close(writer)
    read.join()
    seen: dict[str, list[int]] = {}
    for line in got[0].decode().splitlines():
        name, number, rest = line.split(" ")
        assert rest == "x" * 200
        seen.setdefault(name, []).append(int(number))
    assert seen == {str(name): list(range(500)) for name in range(4)}


@given(
    seed=st.integers(0, 2**32),
    script=st.lists(st.one_of(st.integers(0, 40), st.none()), max_size=60),
    max_lines=st.integers(1, 10),
    count=st.integers(0, 60),
)
def test_every_line_is_written_waiting_or_dropped(
    seed: int, script: list[int | None], max_lines: int, count: int
) -> None:
    """Invariants 2-4: lines are in order, none is torn, and the counts agree."""
    random_ = random.Random(seed)
    descriptor = Scripted(list(script))
    sink = Sink(descriptor, announce, max_lines=max_lines)
    for number in range(count):
        sink.write(f"line {number:0{random_.randint(1, 20)}} whole\n".encode())
        now = sink.statistics()
        assert now.written + now.waiting + now.dropped == number + 1
        assert len(sink._waiting) <= max_lines + 1
    descriptor.script.clear()
    sink._flush()
    assume(not descriptor.ambiguous)
    now = sink.statistics()
    assert now.waiting == 0
    rows = descriptor.got.decode().split("\n")
    # A torn row lacks its suffix.
    numbers = [int(row[5:-6]) for row in rows if row.endswith(" whole")]
    announced = sum(int(row[8:-6]) for row in rows if row.endswith(" lines"))
    assert len(numbers) == now.written
    assert announced == now.dropped
    assert numbers == sorted(set(numbers))
