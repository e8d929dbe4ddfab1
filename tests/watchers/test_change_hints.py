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
    """The events that an overflow dropped may be relevant, even if those kept are not (C08)."""
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


async def test_the_former_target_of_a_link_is_not_watched(tmp_path: Path, watched: Path) -> None:
    """After a link has a new target, changes in the old one give no hints."""
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


async def test_debounce_ends_without_hints_or_at_its_limit(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debouncing lasts while hints come, and no longer than MAX_DEBOUNCE."""
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


async def test_a_wait_ends_after_its_seconds(watched: Path) -> None:
    """Without a hint, the wait ends after its seconds and returns False."""
    with Hints(watched) as hints:
        hints.subscribe()
        assert not await hints.wait(0.01)
        (watched / "a.yaml").touch()
        assert await hints.wait(SOON)


def test_exhausted_inotify_watches_are_reported(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel has no watch left, the fault says what to raise; it ends when one is free."""

    def refused(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with Hints(watched) as hints:
        with monkeypatch.context() as patch:
            patch.setattr(Inotify, "add_watch", refused)
            hints.subscribe()
        assert "raise fs.inotify.max_user_watches" in hints.fault
        hints.subscribe()
        assert hints.fault == ""
