"""How every benchmark prints: one line a measurement, ours beside a floor and the target.

The floor is the least code that does the job in name only; the ratio tells how much of the
machine's speed is left, and stays comparable when the machine is noisy.
"""

from __future__ import annotations


def heading() -> None:
    """The names of the columns that row() prints."""
    print(f"{'what':<44}{'ours':>10}{'floor':>10}{'ratio':>8}  {'unit':<8}target")


def row(name: str, ours: float, floor: float | None, unit: str, target: str) -> None:
    """One measurement; *floor* None where there is nothing to compare with."""
    beside = f"{floor:>10.1f}{ours / floor:>8.3f}" if floor else f"{'-':>10}{'-':>8}"
    print(f"{name:<44}{ours:>10.1f}{beside}  {unit:<8}{target}")
