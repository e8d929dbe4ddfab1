"""The identity of the state directory: by it a start notices that the directory was copied.

``STATE/identity`` holds a random id, and where the directory was when that was written: its inode
and device, the boot and the machine. At the next start:

| boot, machine | inode | the directory is |
|---|---|---|
| same boot | same | the same one; on another device it was remounted, or is a snapshot |
| same boot | other | a copy: it gets a new id, and its open operations are held once |
| other boot, same machine | any | the same one: no program of it is left |
| other boot, other machine | any | moved: recovery holds operations of another machine |

A copy that is used after a reboot, or on a machine with the same machine id, cannot be told from a
restart. A rename, a bind mount and a restarted container keep the inode.
"""

from __future__ import annotations

import enum
import json
import secrets
from pathlib import Path

import attrs

from reconciled.durability import replace
from reconciled.journal.host_identity import HostIdentity

NAME = "identity"


class Origin(enum.Enum):
    """What the state directory is, compared with its identity."""

    NEW = enum.auto()
    SAME = enum.auto()
    MOVED = enum.auto()
    COPY = enum.auto()


@attrs.frozen
class StateIdentity:
    """A state directory: its random id, and where it was last."""

    id: str
    inode: int
    device: int
    boot_id: str
    machine_id: str

    def compare(self, inode: int, host: HostIdentity) -> Origin:
        """What a directory with this identity is, if it has *inode* on *host* now."""
        if self.boot_id == host.boot_id:
            return Origin.SAME if self.inode == inode else Origin.COPY
        if self.machine_id and self.machine_id == host.machine_id:
            return Origin.SAME
        return Origin.MOVED


@attrs.frozen
class ExaminedState:
    """The state directory at a start; made by examine().

    current  its identity from now on; save() makes that durable
    origin   what it is compared with *earlier*
    earlier  the identity that it had; None: none, or an unreadable one
    """

    state: Path
    current: StateIdentity
    origin: Origin
    earlier: StateIdentity | None

    def save(self) -> None:
        """Write the identity durably if it has changed, after what follows from that is durable.

        Blocks. Raises OSError: then the next start finds the same origin.
        """
        if self.current == self.earlier:
            return
        data = json.dumps(attrs.asdict(self.current)).encode()
        replace(self.state / NAME, data + b"\n")


def examine(state: Path, host: HostIdentity | None = None) -> ExaminedState:
    """Compare *state* with its identity; only for the holder of its lock. Raises OSError.

    An unreadable identity counts as that of a copy: whose operations these are is unknown.
    """
    host = host or HostIdentity.current()
    place = state.stat()
    earlier, origin = None, Origin.NEW
    try:
        earlier = _parse((state / NAME).read_bytes())
        origin = earlier.compare(place.st_ino, host)
    except FileNotFoundError:
        pass
    except (ValueError, TypeError):
        origin = Origin.COPY
    identity = StateIdentity(
        earlier.id if earlier and origin is Origin.SAME else secrets.token_hex(16),
        place.st_ino,
        place.st_dev,
        host.boot_id,
        host.machine_id,
    )
    return ExaminedState(state, identity, origin, earlier)


def _parse(content: bytes) -> StateIdentity:
    """Raises ValueError or TypeError."""
    return StateIdentity(**json.loads(content))
