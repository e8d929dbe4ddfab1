"""``systemctl show``, used where there is no bus: its output as properties of D-Bus types."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from reconciled.service.unit.facts import PROPERTIES, Properties, UnitUnavailable, parse_timespan

_ARGUMENTS = re.compile(r"argv\[\]=(.*?) ; ")
_LISTS = {"TriggeredBy", "DropInPaths", "ReadWritePaths", "ReadOnlyPaths", "InaccessiblePaths"}
_LISTS |= {"StateDirectory", "CacheDirectory", "LogsDirectory", "RuntimeDirectory"}
_FLAGS = {"NeedDaemonReload", "SendSIGKILL", "PrivateTmp"}
_NUMBERS = {"MainPID", "StartLimitBurst"}
_COMMANDS = {"ExecStart", "ExecStopPost"}


def systemctl_show(names: Sequence[str], timeout: float) -> list[Properties] | UnitUnavailable:
    """The properties of the units *names*, within *timeout* seconds. Never raises."""
    command = [
        "systemctl",
        "show",
        "--no-pager",
        f"--property={','.join(PROPERTIES)}",
        "--",
        *names,
    ]
    try:
        done = subprocess.run(  # noqa: S603 - fixed words, and names after the last option
            command, capture_output=True, text=True, errors="replace", check=False,
            timeout=timeout, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return UnitUnavailable(f"systemctl: {error}")
    # An empty line separates two units.
    shown = [parse_show_output(part) for part in done.stdout.split("\n\n") if part.strip()]
    complete = len(shown) == len(names) and all("LoadState" in each for each in shown)
    if done.returncode or not complete:
        message = done.stderr.strip().partition("\n")[0]
        return UnitUnavailable(f"systemctl: {message or f'exit code {done.returncode}'}")
    return shown


def parse_show_output(text: str) -> Properties:
    """The properties in *text*, one a line; those of an unknown form are left out."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name in _COMMANDS:
            arguments = _ARGUMENTS.search(value)
            if arguments:
                found.setdefault(name, []).append(("", _split_command(arguments[1])))
        elif name == "Listen":
            path, _, kind = value.rpartition(" ")
            found.setdefault(name, []).append((kind, path))
        elif name in PROPERTIES and value != "[not set]":
            found[name] = _value(name, value)
    if "ExecStart" in found:
        found.setdefault("ExecStopPost", [])  # systemctl prints no line for an empty list
    return {name: value for name, value in found.items() if value is not None}


def _value(name: str, value: str) -> Any:
    if name.endswith("USec"):
        return parse_timespan(value)
    if name in _FLAGS:
        return value == "yes"
    if name in _NUMBERS:
        return int(value) if value.isdecimal() else None
    if name in _LISTS:
        return value.split()
    if name == "RestartPreventExitStatus":
        # The list also contains signals, by name.
        return [int(word) for word in value.split() if word.isdecimal()], []
    return value


def _split_command(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
