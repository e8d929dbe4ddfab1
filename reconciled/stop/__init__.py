"""The staged stop: what ends when, and what may outlive what.

Read ``stages`` in core first (the vocabulary), then ``work`` (what one run may do while a
stop goes on), then ``stop`` (how a stop moves through its stages, in three sizes).
"""

from reconciled.stop.stop import Stop
from reconciled.stop.work import (
    Cut,
    Overrun,
    Refused,
    Section,
    Work,
    cleanup_scope,
    covering_section,
)

__all__ = [
    "Cut",
    "Overrun",
    "Refused",
    "Section",
    "Stop",
    "Work",
    "cleanup_scope",
    "covering_section",
]
