"""Hints from real inotify."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from asyncinotify import Inotify

from reconciled.watchers import change_hints
from reconciled.watchers.change_hints import Hints

SOON = 5.0


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    path = tmp_path / "watched"
    path.mkdir()
    return path


def touch(path: Path) -> None:
    path.touch()


def queue_limit() -> int:
    return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


async def test_an_overflow_is_a_hint(watched: Path) -> None:
    """Although only events of no interest were kept, what was lost may be of interest (C08)."""
    logs = [watched / "one.log", watched / "two.log"]
    for log in logs:
        log.touch()
    with Hints(watched) as hints:
        hints.subscribe()
        for turn in range(queue_limit() + 2):
            logs[turn % 2].chmod(0o600 + turn % 4)
        (watched / "a.yaml").touch()
        assert await hints.take_pending()
        assert not await hints.take_pending()


async def test_the_directory_that_was_is_not_watched(tmp_path: Path, watched: Path) -> None:
    """After a link leads elsewhere, what happens at its old end is no hint."""
    other, link, following = tmp_path / "other", tmp_path / "link", tmp_path / "following"
    other.mkdir()
    link.symlink_to(watched)
    with Hints(link) as hints:
        hints.subscribe()
        following.symlink_to(other)
        following.rename(link)
        assert await hints.take_pending()
        hints.subscribe()
        touch(watched / "a.yaml")
        assert not await hints.take_pending()
        (other / "a.yaml").touch()
        assert await hints.take_pending()


async def test_a_burst_ends_with_quiet_or_in_time(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for quiet lasts while hints come, and no longer than a burst may."""
    monkeypatch.setattr(change_hints, "DEBOUNCE", 0.2)
    monkeypatch.setattr(change_hints, "MAX_DEBOUNCE", 1.0)
    with Hints(watched) as hints:
        hints.subscribe()
        began = trio.current_time()
        await hints.debounce()
        assert trio.current_time() - began >= 0.2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_touching, watched / "a.yaml", name="writer")
            began = trio.current_time()
            with trio.fail_after(SOON):
                await hints.debounce()
            assert trio.current_time() - began >= 1.0
            nursery.cancel_scope.cancel(reason="burst is over")


async def keep_touching(path: Path) -> None:
    while True:
        touch(path)
        await trio.sleep(0.01)


async def test_waiting_ends_at_its_time(watched: Path) -> None:
    """Without a hint the wait ends after its seconds, and says that none came."""
    with Hints(watched) as hints:
        hints.subscribe()
        assert not await hints.wait(0.01)
        (watched / "a.yaml").touch()
        assert await hints.wait(SOON)


def test_watches_that_ran_out_are_said(watched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has no watch left, the fault says what to raise, and goes when it has."""

    def refused(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with Hints(watched) as hints:
        with monkeypatch.context() as patch:
            patch.setattr(Inotify, "add_watch", refused)
            hints.subscribe()
        assert "raise fs.inotify.max_user_watches" in hints.fault
        hints.subscribe()
        assert hints.fault == ""
