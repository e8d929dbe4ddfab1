"""Which machine this is, and which of its boots: what tells whether a child can be alive."""

from __future__ import annotations

from pathlib import Path

import attrs

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MACHINE = Path("/etc/machine-id")


@attrs.frozen
class HostIdentity:
    """Identities as the kernel and the installation give them; empty where they give none."""

    boot_id: str = ""
    machine_id: str = ""

    @classmethod
    def current(cls) -> HostIdentity:
        """This machine, now. Reads two small files; never raises."""
        return cls(_read(_BOOT), _read(_MACHINE))


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:
        return ""
