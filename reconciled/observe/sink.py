"""Where log records go: in order, through a bounded buffer, never waiting for the reader.

A record is a line of a byte stream, or one datagram to the journal: the same holds for both.

1. A record is handed to the kernel by the very call that logs it while the reader keeps up: what
   was logged before a crash is out.
2. Records leave in the order in which they came; none is torn by another one of ours.
3. A reader that stalls costs memory up to a limit and then records, which are counted. Once it
   reads again, one record says how many are missing, at the place where they are missing.
4. accepted = written + waiting + dropped, at any time.
5. No method raises because of the reader or the disk.

Any thread may write. The lock is held for short sections without waiting in them, so that even
the thread that ends a hung process gets through. Its holder may be interrupted by code that logs
too (a finalizer, a signal handler): it is re-entrant, and such a record goes out after the one
that it interrupted.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import attrs
import trio

from reconciled.observe.output_descriptor import Descriptor

MAX_BYTES = 1 << 20
MAX_LINES = 8192
_BATCH = 64  # records of a stream that one write() takes from the buffer
_WRITES_PER_TURN = (
    500  # writes in a row: then others get their turn, of the event loop or of the lock
)
_RETRY_DELAY = 0.05  # seconds between tries where waiting for the descriptor is no help
# How long a thread waits for the lock: far longer than any holder needs, unless it is hung.
_LOCK_TIMEOUT = 0.2


@attrs.frozen
class SinkStatistics:
    """Records since the start; the sink's own announcements are not counted."""

    written: int
    waiting: int
    dropped: int


@attrs.define(eq=False)
class Sink:
    """Takes whole records. Those of a stream are lines, each ending in a newline.

    datagrams: each write() of *descriptor* is one record, taken whole or not at all, and an
    error of it is that record's own; on a stream an error means that nobody reads any more.
    """

    _descriptor: Descriptor
    # Makes the record that says how many are missing.
    _drop_record: Callable[[int], bytes]
    max_bytes: int = MAX_BYTES
    max_lines: int = MAX_LINES
    datagrams: bool = False
    # Waiting records, and for an announcement how many it says are missing; of the first one
    # _offset bytes are out.
    _waiting: deque[tuple[bytes, int]] = attrs.field(factory=deque, init=False)
    _bytes: int = attrs.field(default=0, init=False)
    _offset: int = attrs.field(default=0, init=False)
    _accepted: int = attrs.field(default=0, init=False)
    _written: int = attrs.field(default=0, init=False)
    _dropped: int = attrs.field(default=0, init=False)
    # Dropped and not yet announced. While it is not 0 records go on being dropped until half the
    # buffer is free: otherwise a slow reader would get an announcement for each.
    _unannounced: int = attrs.field(default=0, init=False)
    # The last thing that went out was a part of a record whose rest was dropped.
    _torn: bool = attrs.field(default=False, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _lock: threading.RLock = attrs.field(factory=threading.RLock, init=False)
    # The lock is held, so that whoever gets it now has interrupted its own thread.
    _is_held: bool = attrs.field(default=False, init=False)
    _reentrant: deque[bytes] = attrs.field(factory=deque, init=False)
    # Wakes flush_forever() from any thread; None while it does not run.
    _wake: Callable[[], None] | None = attrs.field(default=None, init=False)

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<Sink written={now.written} waiting={now.waiting} dropped={now.dropped}>"

    @property
    def is_terminal(self) -> bool:
        """Whether a person reads it."""
        return self._descriptor.is_terminal

    def fileno(self) -> int:
        """For faulthandler, which writes by itself: standard error, unless a stream is ours."""
        return self._descriptor.fd if self._descriptor.fd >= 0 and not self.datagrams else 2

    def statistics(self) -> SinkStatistics:
        """What became of the records so far."""
        waiting = self._accepted - self._written - self._dropped
        return SinkStatistics(self._written, waiting, self._dropped)

    def write(self, record: bytes) -> None:
        """Write *record* now, or keep it for flush_forever(), or drop and count it."""
        with self._lock:
            self._write_or_queue(record)

    def write_from_thread(self, record: bytes) -> bool:
        """As write(), for a thread that may not rely on the others: gives up after 0.2 s.

        False: the lock's holder hangs, and the record was lost.
        """
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT):
            return False
        try:
            self._write_or_queue(record)
        finally:
            self._lock.release()
        return True

    async def flush_forever(self) -> None:
        """Write what waits, whenever the reader is ready. Runs until cancelled, loses nothing."""
        waiting = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def wake() -> None:
            # After the run there is nobody to wake: close() writes the rest.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(waiting.set)

        self._wake = wake
        try:
            while True:
                if self._waiting:
                    await self._wait_writable()
                    with self._locked(_LOCK_TIMEOUT) as held:
                        progress = held and self._flush()
                    if self._waiting and not progress:
                        await trio.sleep(_RETRY_DELAY)
                else:
                    await waiting.wait()
                    waiting = trio.Event()
        finally:
            self._wake = None

    def close(self, timeout: float) -> int:
        """Write what waits, for *timeout* seconds at most, and drop the rest. Any thread.

        Gives how many are missing without having been announced. Afterwards records are only
        counted. End flush_forever() first, unless the process ends.
        """
        until = time.monotonic() + timeout
        with self._locked(timeout) as held:
            if not held or self._closed:
                return 0
            self._flush()
            while self._waiting and (left := until - time.monotonic()) > 0:
                if not self._poll(left):
                    break
                if not self._flush():  # writable, and nobody there: a journal that is stopped
                    time.sleep(min(left, _RETRY_DELAY))
            self._drop_waiting()
            self._closed = True
            with contextlib.suppress(OSError):
                self._descriptor.close()
            return self._unannounced

    def _write_or_queue(self, record: bytes) -> None:
        if self._is_held:
            self._reentrant.append(record)
            return
        self._is_held = True
        try:
            self._write(record)
            while self._reentrant:
                self._write(self._reentrant.popleft())
        finally:
            self._is_held = False

    def _write(self, data: bytes) -> None:
        self._accepted += 1
        if self._closed or (self._unannounced and not self._announce_dropped()):
            self._drop(1)
            return
        if self._waiting:
            self._buffer(data)
            return
        try:
            count = self._descriptor.write(data)
        except OSError:
            self._drop(1)
            return
        if count == len(data):
            self._written += 1
            return
        self._append(data)
        self._offset = count
        if count:
            self._flush()
        if self._waiting and self._wake is not None:
            self._wake()

    def _buffer(self, data: bytes) -> None:
        if self._bytes + len(data) > self.max_bytes or len(self._waiting) >= self.max_lines:
            self._drop(1)
            return
        self._append(data)
        if self._wake is None:  # nobody else will try: the loop does not run yet
            self._flush()

    def _append(self, data: bytes, missing: int = 0) -> None:
        self._waiting.append((data, missing))
        self._bytes += len(data)

    def _drop(self, count: int) -> None:
        self._dropped += count
        self._unannounced += count

    def _announce_dropped(self) -> bool:
        """Put the announcement of what is missing behind what waits, if there is room."""
        if self._bytes * 2 > self.max_bytes or len(self._waiting) * 2 > self.max_lines:
            return False
        record = self._drop_record(self._unannounced)
        if self._torn:
            record = b"\n" + record
        missing, self._unannounced = self._unannounced, 0
        self._append(record, missing)
        self._flush()
        return self._unannounced == 0

    def _flush(self) -> bool:
        """Write what goes out without waiting, within a turn; whether anything did."""
        progress = False
        for _ in range(_WRITES_PER_TURN):
            if not self._waiting:
                break
            try:
                count = self._descriptor.write(self._next())
            except OSError:
                if self.datagrams:
                    self._skip()
                else:
                    self._drop_waiting()
                return True
            if count == 0:
                return progress
            progress = True
            self._advance(count)
        if self._unannounced and not self._closed:
            self._announce_dropped()
        return progress

    def _next(self) -> bytes:
        if self.datagrams:
            return self._waiting[0][0]
        batch = b"".join(data for data, _ in islice(self._waiting, _BATCH))
        return batch[self._offset :]

    def _skip(self) -> None:
        """The first of what waits cannot be sent, now or ever: the others are not concerned."""
        data, missing = self._waiting.popleft()
        self._bytes -= len(data)
        if missing:
            self._unannounced += missing
        else:
            self._drop(1)

    def _advance(self, count: int) -> None:
        self._offset += count
        self._torn = False  # it comes first after a tear, and begins with a newline
        while self._waiting and self._offset >= len(self._waiting[0][0]):
            data, missing = self._waiting.popleft()
            self._offset -= len(data)
            self._bytes -= len(data)
            self._written += missing == 0

    def _drop_waiting(self) -> None:
        """Nobody reads: drop what waits, so that a reader who comes later starts with a record."""
        self._torn = self._torn or self._offset > 0
        self._drop(sum(missing == 0 for _, missing in self._waiting))
        self._unannounced += sum(missing for _, missing in self._waiting)
        self._waiting.clear()
        self._bytes = self._offset = 0

    async def _wait_writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._descriptor.fd)
        except (OSError, ValueError):
            # Not a file that can be waited for, or waited for already by somebody else.
            await trio.sleep(_RETRY_DELAY)

    def _poll(self, timeout: float) -> bool:
        poller = select.poll()
        poller.register(self._descriptor.fd, select.POLLOUT)
        return bool(poller.poll(timeout * 1000))

    @contextlib.contextmanager
    def _locked(self, timeout: float) -> Iterator[bool]:
        if not self._lock.acquire(timeout=timeout):
            yield False
            return
        try:
            if self._is_held:
                yield False
                return
            self._is_held = True
            try:
                yield True
                while self._reentrant:
                    self._write(self._reentrant.popleft())
            finally:
                self._is_held = False
        finally:
            self._lock.release()
