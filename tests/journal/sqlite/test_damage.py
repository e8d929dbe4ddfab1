"""A damaged store is set aside, or opens with its content, at most without a torn tail (C04)."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio
from images import LOG, Content, content_of, copied, fill

from reconciled.core.errors import StoreTooNew
from reconciled.journal.sqlite import wal
from reconciled.journal.sqlite.integrity import MARKER
from reconciled.journal.sqlite.schema import FILE
from reconciled.journal.sqlite.store import Store

MEMORY = Path("/dev/shm")
SEED = random.SystemRandom().randrange(1 << 32)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, if possible: hundreds of openings need no real syncs."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        yield Path(directory)


@pytest.fixture
def logged(place: Path) -> tuple[Path, list[Content]]:
    """A killed store with most of its content in the log."""
    seen = fill(place / "made", place / "image", rounds=3)
    return place / "image", seen


@pytest.fixture
def state(place: Path) -> Path:
    """Where copies are damaged and opened."""
    return place / "state"


def opened(state: Path) -> tuple[Content, Store]:
    """Open, read, close; the next opening finds the same content, without a warning."""
    store = Store.open(state)
    found = content_of(store)
    store.close()
    again = Store.open(state)
    assert content_of(again) == attrs.evolve(found, epoch=found.epoch + 1)
    assert not again.integrity.warning
    assert not again.integrity.damage
    again.close()
    return attrs.evolve(found, epoch=found.epoch - 1), store


def test_a_kill_loses_nothing(logged: tuple[Path, list[Content]], state: Path) -> None:
    """Everything durable is there after a kill, without a warning."""
    image, seen = logged
    found, store = opened(copied(image, state))
    assert found == seen[-1]
    assert not store.integrity.warning
    assert not store.degraded


@pytest.mark.slow
def test_c04_the_log_cut_at_every_byte_of_its_last_transaction(
    logged: tuple[Path, list[Content]], state: Path
) -> None:
    """A torn tail is dropped with one warning; everything before it is there."""
    image, seen = logged
    content = (image / "store" / LOG).read_bytes()
    whole = wal.scan(content)
    before = wal.scan(content[: whole.end - 1]).end
    assert whole.end == len(content)
    assert before < whole.end - wal.FRAME_HEADER_SIZE
    # Each byte of the frame headers; every 61st byte of the pages, and the last ones.
    offsets = {*range(before, before + 64), *range(before, whole.end, 61)}
    offsets |= set(range(whole.end - 64, whole.end))
    for offset in sorted(offsets):
        damaged = copied(image, state)
        with (damaged / "store" / LOG).open("r+b") as stream:
            stream.truncate(offset)
        found, store = opened(damaged)
        assert found == seen[-2], offset
        assert bool(store.integrity.warning) == (offset > before), offset


@pytest.mark.slow
def test_c04_one_byte_flipped_in_the_log(logged: tuple[Path, list[Content]], state: Path) -> None:
    """A flip in the last transaction is a torn tail; before it, the store is set aside."""
    image, seen = logged
    content = (image / "store" / LOG).read_bytes()
    whole = wal.scan(content)
    last = wal.scan(content[: whole.end - 1]).end
    rng = random.Random(SEED)
    print("seed", SEED)
    offsets = [rng.randrange(len(content)) for _ in range(150)]
    offsets += [last + rng.randrange(whole.end - last) for _ in range(20)]
    offsets += [
        *range(32),
        *range(wal.WAL_HEADER_SIZE, wal.WAL_HEADER_SIZE + wal.FRAME_HEADER_SIZE),
    ]
    offsets += [*range(last, last + wal.FRAME_HEADER_SIZE)]
    for offset in offsets:
        damaged = copied(image, state)
        flipped = bytearray(content)
        flipped[offset] ^= 1 << rng.randrange(8)
        (damaged / "store" / LOG).write_bytes(flipped)
        found, store = opened(damaged)
        if offset < last:
            assert store.integrity.damage, offset
            assert store.degraded
        else:
            assert found == seen[-2], offset
            assert store.integrity.warning, offset


def test_c04_a_second_kill_after_a_torn_tail(
    logged: tuple[Path, list[Content]], place: Path, state: Path
) -> None:
    """The remains of a torn tail are not read as a part of later transactions."""
    image, seen = logged
    content = bytearray((image / "store" / LOG).read_bytes())
    whole = wal.scan(bytes(content))
    last = wal.scan(bytes(content[: whole.end - 1])).end
    assert whole.end - last > 2 * (wal.FRAME_HEADER_SIZE + 4096)
    content[last + 100] ^= 1  # its first page did not reach the disk, its last ones did
    (copied(image, state) / "store" / LOG).write_bytes(content)
    store = Store.open(state)
    assert store.integrity.warning
    shutil.copytree(state / "store", place / "second" / "store")
    store.close()
    found, again = opened(copied(place / "second", state))
    assert again.integrity.warning == again.integrity.damage == ""
    assert found.operations == seen[-2].operations


@pytest.mark.parametrize("killed", [False, True])
def test_c04_one_byte_flipped_in_the_database(place: Path, state: Path, *, killed: bool) -> None:
    """A flip is without effect, or the store is set aside or refused: no wrong row is returned."""
    made, image = place / "made", place / "image"
    fill(made, image, rounds=4, killed=False)
    if killed:
        shutil.rmtree(image)
        fill(made, image, rounds=0)
    store = Store.open(copied(image, state))
    truth = content_of(store)
    store.close()
    content = (image / "store" / FILE).read_bytes()
    rng = random.Random(SEED)
    print("seed", SEED)
    verdicts = {"truth": 0, "damage": 0, "newer": 0}
    for offset in [rng.randrange(len(content)) for _ in range(300)] + [*range(100)]:
        damaged = copied(image, state)
        flipped = bytearray(content)
        flipped[offset] ^= 1 << rng.randrange(8)
        (damaged / "store" / FILE).write_bytes(flipped)
        try:
            store = Store.open(damaged)
        except StoreTooNew:
            assert offset in range(60, 64)
            verdicts["newer"] += 1
            continue
        found = content_of(store)
        store.close()
        if store.integrity.damage:
            verdicts["damage"] += 1
            assert store.degraded
        else:
            verdicts["truth"] += 1
            assert found == truth, offset
    print(verdicts)
    assert verdicts["damage"] > 50


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("log missing", "log is empty or missing"),
        ("log empty", "log is empty or missing"),
        ("database missing", "database is empty or missing"),
        ("database empty", "database is empty or missing"),
        ("marker missing", "is missing"),
        ("marker malformed", "is malformed"),
    ],
)
def test_c04_a_lost_file_is_damage(place: Path, state: Path, damage: str, reason: str) -> None:
    """A missing, empty or malformed file is damage, not an older state."""
    made, image = place / "made", place / "image"
    fill(made, place / "first", rounds=1, killed=False)
    fill(made, image, rounds=1)
    store = copied(image, state) / "store"
    if damage.endswith(" missing"):
        (
            store / {"log": LOG, "database": FILE, "marker": MARKER}[damage.split(maxsplit=1)[0]]
        ).unlink()
    elif damage == "marker malformed":
        (store / MARKER).write_bytes(b"open 1x\n")
    else:
        (store / {"log": LOG, "database": FILE}[damage.split(maxsplit=1)[0]]).write_bytes(b"")
    before = {each.name: each.read_bytes() for each in store.iterdir()}
    opened_ = Store.open(state)
    assert reason in opened_.integrity.damage
    aside = opened_.integrity.set_aside_path
    assert aside is not None
    assert content_of(opened_) == Content((), {}, "", 1)
    opened_.close()
    after = {each.name: each.read_bytes() for each in aside.iterdir()}
    assert {name: after[name] for name in before} == before
    assert json.loads((aside / "damage.json").read_text())["damage"] == opened_.integrity.damage


def test_an_older_copy_of_a_closed_store_is_damage(place: Path, state: Path) -> None:
    """A database with a lower generation than its marker was replaced by an older one."""
    made = place / "made"
    fill(made, place / "first", rounds=1, killed=False)
    fill(made, place / "second", rounds=1, killed=False)
    copied(place / "second", state)
    shutil.copyfile(place / "first" / "store" / FILE, state / "store" / FILE)
    store = Store.open(state)
    assert "closed generation mismatch: database 1, marker 2" in store.integrity.damage
    store.close()


def test_a_new_store_is_degraded_until_a_person_clears_it(place: Path, state: Path) -> None:
    """The flag is set by the first commit, survives restarts, and is cleared with who and why."""
    fill(place / "made", place / "image", rounds=1)
    (copied(place / "image", state) / "store" / LOG).unlink()
    for _ in range(2):
        store = Store.open(state)
        assert store.degraded
        assert "store.damaged-" in store.degraded_reason
        store.close()

    async def clear() -> None:
        store = Store.open(state)
        async with trio.open_nursery() as nursery:
            await nursery.start(store.run)
            await store.clear_degraded("root", "looked at it")
            assert not store.degraded
            nursery.cancel_scope.cancel(reason="test")

    trio.run(clear)
    store = Store.open(state)
    assert not store.degraded
    assert store.writer.meta.settled.endswith(" root: looked at it")
    store.close()


def test_c04_a_kill_while_damage_is_set_aside(
    place: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill between the rename and its first commit, the new store is degraded as well."""
    fill(place / "made", place / "image", rounds=1)
    (copied(place / "image", state) / "store" / LOG).unlink()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("reconciled.journal.sqlite.lifecycle._begin", killed)
        with pytest.raises(KeyboardInterrupt):
            Store.open(state)
    assert len(list(state.glob("store.damaged-*"))) == 1
    store = Store.open(state)
    assert store.degraded
    assert not store.integrity.damage
    store.close()


def test_c04_a_kill_at_each_write_of_an_opening(place: Path, state: Path) -> None:
    """Opening can be interrupted at any point: the next opening has the same result."""
    seen = fill(place / "made", place / "image", rounds=2)
    images = place / "images"
    copied(place / "image", state)
    points = 0

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal points
        if watched and event in ("os.rename", "os.remove", "open", "sqlite3.connect"):
            watched.clear()
            shutil.copytree(state / "store", images / str(points) / "store")
            points += 1
            watched.append(state)

    watched = [state]
    sys.addaudithook(hook)
    Store.open(state).close()
    watched.clear()
    assert points > 10
    for point in range(points):
        found, store = opened(copied(images / str(point), state))
        assert (found.operations, found.applied) == (seen[-1].operations, seen[-1].applied), point
        assert store.integrity.warning == store.integrity.damage == "", point
