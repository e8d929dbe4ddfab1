"""Operation ids and the log in memory."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from reconciled.core.resources import Key
from reconciled.journal.ids import OperationIds
from reconciled.journal.operations import VolatileOperations
from reconciled.journal.records import (
    Ending,
    OperationOpen,
    OperationUnknown,
    StepState,
)

KEY = Key("site/motd")


@given(st.lists(st.floats(min_value=0, max_value=4e9), min_size=2, max_size=30))
def test_ids_rise_whatever_the_clock_does(times: list[float]) -> None:
    """Ids of one process are unique and sort in the order of their making."""
    clock = iter(times)
    ids = OperationIds(now=lambda: next(clock))
    made = [ids.new() for _ in times]
    assert made == sorted(set(made))
    assert {len(each) for each in made} == {26}


def test_ids_sort_by_time_across_processes() -> None:
    """An id made later elsewhere is higher, whatever its random part."""
    low = OperationIds(now=lambda: 1000.0, random=lambda bits: 2**bits - 1)
    high = OperationIds(now=lambda: 1000.001, random=lambda _bits: 0)
    assert low.new() < high.new()


async def test_an_operation_is_noted_and_ends() -> None:
    """What is open is listed with its steps until it ends; then nothing of it stays."""
    log = VolatileOperations(epoch=7, now=lambda: 5.0)
    record = await log.begin(KEY, "write", {"path": "/etc/motd"})
    assert (record.key, record.name, record.attempt, record.epoch) == (KEY, "write", 1, 7)
    assert (record.pinned, record.begun) == ({"path": "/etc/motd"}, 5.0)
    await log.step(record.id, "replace", "idempotent", StepState.STARTED)
    assert log.open()[0].last_step == ""
    assert await log.step(record.id, "replace", "idempotent", StepState.DONE, (1, 2)) == [1, 2]
    await log.step(record.id, "after", "once", StepState.STARTED)
    found = log.find(record.id)
    assert found is not None
    assert found.last_step == "replace"
    step = found.step("replace")
    assert step is not None
    assert (step.state, step.data) == (StepState.DONE, [1, 2])
    await log.end(record.id, Ending.DONE)
    assert log.open() == []
    assert log.find(record.id) is None
    assert (log._open, log._by_key) == ({}, {})


async def test_one_open_operation_a_key() -> None:
    """A second one is refused with the name of the first; after its end the key is free."""
    log = VolatileOperations(epoch=1)
    first = await log.begin(KEY, "write", None)
    with pytest.raises(OperationOpen, match=f"open operation write \\({first.id}\\)") as caught:
        await log.begin(KEY, "again", None)
    assert caught.value.record == first
    await log.begin(Key("site/other"), "write", None)
    await log.end(first.id, Ending.FAILED)
    second = await log.begin(KEY, "again", None)
    assert second.id > first.id


async def test_what_is_not_open_is_an_error() -> None:
    """Steps and endings of an operation that is not open are refused, not invented."""
    log = VolatileOperations(epoch=1)
    with pytest.raises(OperationUnknown):
        await log.step("0" * 26, "x", "pure", StepState.DONE)
    with pytest.raises(OperationUnknown):
        await log.end("0" * 26, Ending.DONE)


async def test_data_beyond_json_is_refused_and_nothing_noted() -> None:
    """What the durable log could not keep is refused here as well."""
    log = VolatileOperations(epoch=1)
    record = await log.begin(KEY, "write", None)
    with pytest.raises(TypeError):
        await log.step(record.id, "x", "pure", StepState.DONE, object())
    assert log.open()[0].steps == ()
    with pytest.raises(TypeError):
        await log.begin(Key("site/other"), "write", object())
    assert len(log.open()) == 1


async def test_a_cancelled_begin_noted_nothing_and_an_end_always_does() -> None:
    """Cancellation leaves no open operation behind."""
    log = VolatileOperations(epoch=1)
    with trio.move_on_after(0):
        await log.begin(KEY, "write", None)
    assert log.open() == []
    record = await log.begin(KEY, "write", None)
    with trio.move_on_after(0) as scope:
        await log.end(record.id, Ending.DONE)
    assert not scope.cancelled_caught
    assert log.open() == []
