"""Which directive of a unit keeps the service from writing a path: a judgement without effects.

The most specific rule counts, as in the sandbox itself: a writable directory inside a read-only
one is writable, and nothing opens what is hidden. Links are not followed.
"""

from __future__ import annotations

from reconciled.service.unit_facts import Sandbox

_HOMES = ("/home", "/root", "/run/user")
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - they are only compared with
# What each value of ProtectSystem= makes read-only, and what it leaves.
_SYSTEM = {
    "yes": ("/usr", "/boot", "/efi"),
    "full": ("/usr", "/boot", "/efi", "/etc"),
    "strict": ("/",),
}
_API_FILE_SYSTEMS = {"strict": ("/dev", "/proc", "/sys")}


def blocking_directive(sandbox: Sandbox, path: str) -> str | None:
    """The directive, with its value, that stands in the way of writing *path*; None: none does."""
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
    # Of two for one place the later one: what is made writable by name is writable.
    longest = max((len(place) for place, _ in matching), default=0)
    return next((told for place, told in reversed(matching) if len(place) == longest), None)


def _within(path: str, directory: str) -> bool:
    return directory in ("/", path) or path.startswith(f"{directory.rstrip('/')}/")
