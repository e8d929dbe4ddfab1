"""Determines which directive of a unit prevents the service from writing a path.

Without I/O. The most specific rule counts, as in the sandbox itself: a writable directory inside a
read-only one is writable, and a hidden directory stays hidden. Links are not followed.
"""

from __future__ import annotations

from reconciled.service.unit.facts import Sandbox

_HOMES = ("/home", "/root", "/run/user")
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - only compared with
# The paths that each value of ProtectSystem= makes read-only, and those that it excepts.
_SYSTEM = {
    "yes": ("/usr", "/boot", "/efi"),
    "full": ("/usr", "/boot", "/efi", "/etc"),
    "strict": ("/",),
}
_API_FILE_SYSTEMS = {"strict": ("/dev", "/proc", "/sys")}


def blocking_directive(sandbox: Sandbox, path: str) -> str | None:
    """The directive, with its value, that prevents writing *path*; None: none does."""
    if any(_within(path, each) for each in sandbox.inaccessible):
        return "InaccessiblePaths="
    home = any(_within(path, each) for each in _HOMES)
    if home and sandbox.protect_home in ("yes", "tmpfs"):
        return f"ProtectHome={sandbox.protect_home}"
    if sandbox.private_tmp and any(_within(path, each) for each in _TEMPORARY):
        return "PrivateTmp=yes"
    rules: list[tuple[str, str | None]] = [(each, "ReadOnlyPaths=") for each in sandbox.read_only]
    system = f"ProtectSystem={sandbox.protect_system}"
    rules += [(each, system) for each in _SYSTEM.get(sandbox.protect_system, ())]
    rules += [(each, None) for each in _API_FILE_SYSTEMS.get(sandbox.protect_system, ())]
    if sandbox.protect_home == "read-only":
        rules += [(each, "ProtectHome=read-only") for each in _HOMES]
    rules += [(each, None) for each in sandbox.writable]
    matching = [rule for rule in rules if _within(path, rule[0])]
    # Of two rules for one directory the later one counts: ReadWritePaths= overrides.
    longest = max((len(prefix) for prefix, _ in matching), default=0)
    return next((rule for prefix, rule in reversed(matching) if len(prefix) == longest), None)


def _within(path: str, directory: str) -> bool:
    return directory in ("/", path) or path.startswith(f"{directory.rstrip('/')}/")
