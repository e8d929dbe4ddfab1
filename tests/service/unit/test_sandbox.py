"""The directive of a sandbox that prevents a service from writing a path."""

from __future__ import annotations

import pytest

from reconciled.service.unit.facts import Sandbox
from reconciled.service.unit.sandbox import blocking_directive

STRICT = Sandbox(
    "strict", "yes", private_tmp=True, writable=("/var/lib/reconciled", "/run/reconciled")
)


@pytest.mark.parametrize(
    ("sandbox", "path", "directive"),
    [
        (STRICT, "/etc/motd", "ProtectSystem=strict"),
        (STRICT, "/var/lib/reconciled/x", None),
        (STRICT, "/var/lib/reconciled", None),
        (STRICT, "/var/lib/reconciled-else/x", "ProtectSystem=strict"),
        (STRICT, "/root/x", "ProtectHome=yes"),
        (STRICT, "/tmp/x", "PrivateTmp=yes"),
        (STRICT, "/dev/shm/x", None),
        (Sandbox(), "/etc/motd", None),
        (Sandbox("yes"), "/etc/motd", None),
        (Sandbox("yes"), "/usr/bin/x", "ProtectSystem=yes"),
        (Sandbox("full"), "/etc/motd", "ProtectSystem=full"),
        (Sandbox("full"), "/srv/x", None),
        (Sandbox("full", writable=("/etc",)), "/etc/motd", None),
        (Sandbox("strict", writable=("/",)), "/etc/motd", None),
        (Sandbox(protect_home="read-only"), "/root/x", "ProtectHome=read-only"),
        (Sandbox(protect_home="read-only", writable=("/root/x",)), "/root/x/y", None),
        (Sandbox(protect_home="tmpfs", writable=("/root/x",)), "/root/x/y", "ProtectHome=tmpfs"),
        (Sandbox(read_only=("/srv",), writable=("/srv/a",)), "/srv/a/x", None),
        (Sandbox(read_only=("/srv/a",), writable=("/srv",)), "/srv/a/x", "ReadOnlyPaths="),
        (Sandbox(inaccessible=("/srv",), writable=("/srv/a",)), "/srv/a/x", "InaccessiblePaths="),
    ],
)
def test_the_most_specific_rule_counts(sandbox: Sandbox, path: str, directive: str | None) -> None:
    """The innermost directive decides; a path below a hidden one is hidden."""
    assert blocking_directive(sandbox, path) == directive
