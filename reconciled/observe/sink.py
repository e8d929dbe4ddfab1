"""Writes log records in order, through a bounded buffer, without waiting for the reader.

A record is a line of a byte stream, or one datagram to the journal. The invariants hold for both:

1. While the reader keeps up, the call that logs a record hands it to the kernel: a record that
   was logged before a crash is written.
2. Records are written in the order of the calls, and never interleaved.
3. If the reader stalls, records are buffered up to a limit; further ones are dropped and counted.
   Once it reads again, one record reports the number of dropped ones, at their position.
4. accepted = written + waiting + dropped, at any time.
5. No method raises because of the reader or the disk.

Any thread may write. The lock is held for short sections that do not block, so that the thread
that ends a hung process can acquire it. Code that logs (a finalizer, a signal handler) may
interrupt the holder: the lock is re-entrant, and such a record is written after the interrupted
one.
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
# Writes in a row, before the event loop runs other tasks and other threads can take the lock.
_WRITES_PER_TURN = 500
_RETRY_DELAY = 0.05  # seconds between tries where the descriptor cannot be waited for
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
    """Accepts whole records. Those of a stream are lines, each ending in a newline.

    datagrams: each write() of *descriptor* is one record, sent whole or not at all, and its
    error concerns that record alone; on a stream an error means that there is no reader any more.
    """

    _descriptor: Descriptor
    # Renders the record that reports the number of dropped ones.
    _drop_record: Callable[[int], bytes]
    max_bytes: int = MAX_BYTES
    max_lines: int = MAX_LINES
    datagrams: bool = False
    # Waiting records, and for an announcement the number of dropped records that it reports. Of
    # the first one _offset bytes are written.
    _waiting: deque[tuple[bytes, int]] = attrs.field(factory=deque, init=False)
    _bytes: int = attrs.field(default=0, init=False)
    _offset: int = attrs.field(default=0, init=False)
    _accepted: int = attrs.field(default=0, init=False)
    _written: int = attrs.field(default=0, init=False)
    _dropped: int = attrs.field(default=0, init=False)
    # Dropped and not yet announced. While it is not 0, records are dropped until half the buffer
    # is free: otherwise a slow reader would get an announcement for each.
    _unannounced: int = attrs.field(default=0, init=False)
    # The last bytes written are a part of a record whose remainder was dropped.
    _torn: bool = attrs.field(default=False, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _lock: threading.RLock = attrs.field(factory=threading.RLock, init=False)
    # The lock is held: a caller that acquires it nevertheless has interrupted its own thread.
    _is_held: bool = attrs.field(default=False, init=False)
    _reentrant: deque[bytes] = attrs.field(factory=deque, init=False)
    # Wakes flush_forever() from any thread; None while it does not run.
    _wake: Callable[[], None] | None = attrs.field(default=None, init=False)

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<Sink written={now.written} waiting={now.waiting} dropped={now.dropped}>"

    @property
    def is_terminal(self) -> bool:
        """Whether the descriptor is a terminal."""
        return self._descriptor.is_terminal

    def fileno(self) -> int:
        """For faulthandler, which writes to a descriptor: the stream's, or standard error."""
        return self._descriptor.fd if self._descriptor.fd >= 0 and not self.datagrams else 2

    def statistics(self) -> SinkStatistics:
        """How many records were written, wait, and were dropped so far."""
        waiting = self._accepted - self._written - self._dropped
        return SinkStatistics(self._written, waiting, self._dropped)

    def write(self, record: bytes) -> None:
        """Write *record* now, or buffer it for flush_forever(), or drop and count it."""
        with self._lock:
            self._write_or_queue(record)

    def write_from_thread(self, record: bytes) -> bool:
        """As write(), for a thread that cannot rely on the others: gives up after 0.2 s.

        False: the lock's holder hangs, and the record is lost.
        """
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT):
            return False
        try:
            self._write_or_queue(record)
        finally:
            self._lock.release()
        return True

    async def flush_forever(self) -> None:
        """Write the buffered records whenever the reader is ready. Runs until cancelled.

        Cancellation loses no record: close() writes those that wait.
        """
        waiting = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def wake() -> None:
            # After the run there is no task to wake: close() writes the remaining records.
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
        """Write the buffered records, for *timeout* seconds at most, and drop the remaining ones.

        Returns how many were dropped without an announcement. Later records are only counted. Any
        thread may call it. End flush_forever() first, unless the process ends.
        """
        until = time.monotonic() + timeout
        with self._locked(timeout) as held:
            if not held or self._closed:
                return 0
            self._flush()
            while self._waiting and (left := until - time.monotonic()) > 0:
                if not self._poll(left):
                    break
                if not self._flush():  # writable without a receiver: the journal is stopped
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
        if self._wake is None:  # flush_forever() does not run yet
            self._flush()

    def _append(self, data: bytes, missing: int = 0) -> None:
        self._waiting.append((data, missing))
        self._bytes += len(data)

    def _drop(self, count: int) -> None:
        self._dropped += count
        self._unannounced += count

    def _announce_dropped(self) -> bool:
        """Append the announcement of dropped records to the buffer, if there is room."""
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
        """Write what the descriptor accepts without blocking; whether there was progress."""
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
        """Drop the first waiting record, which can never be sent; the others are kept."""
        data, missing = self._waiting.popleft()
        self._bytes -= len(data)
        if missing:
            self._unannounced += missing
        else:
            self._drop(1)

    def _advance(self, count: int) -> None:
        self._offset += count
        self._torn = False  # the first bytes after a torn record are a newline
        while self._waiting and self._offset >= len(self._waiting[0][0]):
            data, missing = self._waiting.popleft()
            self._offset -= len(data)
            self._bytes -= len(data)
            self._written += missing == 0

    def _drop_waiting(self) -> None:
        """Drop all waiting records: there is no reader, and a later one starts with a record."""
        self._torn = self._torn or self._offset > 0
        self._drop(sum(missing == 0 for _, missing in self._waiting))
        self._unannounced += sum(missing for _, missing in self._waiting)
        self._waiting.clear()
        self._bytes = self._offset = 0

    async def _wait_writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._descriptor.fd)
        except (OSError, ValueError):
            # A file that cannot be polled, or one that another task waits for already.
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
