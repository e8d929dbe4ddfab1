"""The staged stop: what ends at which stage, and what may outlive it.

Read ``stages`` in core first (the vocabulary), then ``work`` (what one run may do during a
stop), then ``stop`` (how a stop moves through its stages, in three sizes).
"""

from reconciled.core.errors import CriticalRefused, Overrun
from reconciled.core.stages import Cut
from reconciled.stop.registry import covering_section
from reconciled.stop.section import Section
from reconciled.stop.stop import Stop
from reconciled.stop.work import Work, cleanup_scope

__all__ = [
    "CriticalRefused",
    "Cut",
    "Overrun",
    "Section",
    "Stop",
    "Work",
    "cleanup_scope",
    "covering_section",
]
