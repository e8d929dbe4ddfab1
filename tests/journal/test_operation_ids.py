"""Ids of operations are unique and sort by time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reconciled.journal.operation_ids import OperationIds


@given(st.lists(st.floats(min_value=0, max_value=4e9), min_size=2, max_size=30))
def test_ids_rise_if_the_clock_does_not(times: list[float]) -> None:
    """Ids of one process are unique and rise, also if the clock is set back."""
    clock = iter(times)
    ids = OperationIds(now=lambda: next(clock))
    made = [ids.new() for _ in times]
    assert made == sorted(set(made))
    assert {len(each) for each in made} == {26}


def test_ids_sort_by_time_across_processes() -> None:
    """An id that is made later in another process is greater."""
    low = OperationIds(now=lambda: 1000.0, random=lambda bits: 2**bits - 1)
    high = OperationIds(now=lambda: 1000.001, random=lambda _bits: 0)
    assert low.new() < high.new()
