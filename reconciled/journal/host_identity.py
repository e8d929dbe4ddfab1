"""Identity of this machine and this boot: a process of another one cannot be ours."""

from __future__ import annotations

from pathlib import Path

import attrs

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MACHINE = Path("/etc/machine-id")


@attrs.frozen
class HostIdentity:
    """Boot id of the kernel and machine id of the installation; empty: not available."""

    boot_id: str = ""
    machine_id: str = ""

    @classmethod
    def current(cls) -> HostIdentity:
        """The identity of this machine and boot. Reads two small files; never raises."""
        return cls(_read(_BOOT), _read(_MACHINE))


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:
        return ""
