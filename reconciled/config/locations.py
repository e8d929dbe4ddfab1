"""Finds configuration, state directory and control socket, even if the configuration is invalid.

1. The rules are those of ``load``, so that commands that run without a valid configuration, such
   as ``reap`` after the daemon has ended, use the same file and the same directory.
2. Nothing is validated. A file that cannot be read counts as empty; of a file with a syntax
   error, the part before the error counts.
3. The YAML parser is imported only if a file seems to contain the wanted key. Most files leave
   state and socket to the service manager, and the import would then be most of the cost.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_DEFAULT = Path("/etc/reconciled/reconciled.yaml")
# Where a service manager creates configuration directories and runtime directories.
_ETC, _RUN = Path("/etc"), Path("/run")
_SOCKET = "control.sock"
# Without ``include``. A directory that does not exist is not an error.
DEFAULT_INCLUDES = ("conf.d/*.yaml",)
# A key anywhere outside comments; "#" begins a comment only after white space.
_KEY_PATTERN = rb"^(?:[^#\n]|(?<=\S)#)*\b%s[\"']?\s*:"


def find_config(argument: str | None, environ: Mapping[str, str]) -> Path:
    """The path of the configuration; the file need not exist."""
    chosen = argument or environ.get("RECONCILED_CONFIG")
    if chosen:
        return Path(os.path.normpath(Path.cwd() / chosen))
    directory = environ.get("CONFIGURATION_DIRECTORY", "").partition(":")[0]
    # systemd joins several directories with colons, in the order of the unit.
    return Path(directory) / "reconciled.yaml" if directory else _DEFAULT


def find_state(config: Path, environ: Mapping[str, str]) -> Path | None:
    """The state directory of a daemon that runs with *config*; None if nothing names one.

    As in the daemon, the configuration comes before $STATE_DIRECTORY. In the opposite order,
    ``reap`` would miss the programs of a daemon whose configuration sets ``state``.
    """
    for file in [config, *_included(config)]:
        for written in _top_level(file, "state"):
            return Path(os.path.normpath(file.parent / written))
    directory = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(directory) if directory else None


def find_socket(config: Path, environ: Mapping[str, str]) -> Path | None:
    """The control socket of a daemon that runs with *config*; None if nothing names one.

    The first candidate that exists. So after a change of ``control.socket`` the verbs still
    reach the running daemon, which reports that the change needs a restart.
    """
    first = None
    # One at a time: if the first exists, the rest of the configuration is not read.
    for each in _candidate_sockets(config, environ):
        if _may_exist(each):
            return each
        first = first or each
    return first  # none exists: this is the one to report as missing


def _may_exist(path: Path) -> bool:
    """Whether *path* exists. Without permission to see it: True, connecting reports the error."""
    try:
        path.stat()
    except PermissionError:
        return True
    except (OSError, ValueError):  # absent, a name that is too long, or one with a NUL
        return False
    return True


def _candidate_sockets(config: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    for file in [config, *_included(config)]:
        words = [*_top_level(file, "control")]
        if words[:1] == ["socket"] and len(words) > 1:
            yield Path(os.path.normpath(file.parent / words[1]))
    directory = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if directory:
        yield Path(directory) / _SOCKET
    elif config.parent.parent == _ETC and config.parent.name.startswith("reconciled"):
        # A shell does not have the environment of the service, but the service manager gives all
        # directories of a unit the same name, also those of an instance.
        yield _RUN / config.parent.name / _SOCKET
    state = find_state(config, environ)
    if state is not None:
        yield state / _SOCKET


def _included(config: Path) -> list[Path]:
    named = [each for each in _top_level(config, "include") if "\0" not in each]
    patterns = named or DEFAULT_INCLUDES
    base = glob.escape(str(config.parent))
    whole = (os.path.join(base, pattern) for pattern in patterns)  # noqa: PTH118 - a pattern
    return sorted(Path(found) for pattern in whole for found in glob.glob(pattern))  # noqa: PTH207 - Path.glob takes no absolute pattern


def _top_level(file: Path, wanted: str) -> Iterator[str]:
    """The value of the top-level key *wanted* in *file*: the scalar, or the scalars below it."""
    try:
        data = file.read_bytes()
    except OSError:
        return
    if re.search(_KEY_PATTERN % wanted.encode(), data, re.MULTILINE):
        yield from _words(data, wanted)


def _words(data: bytes, wanted: str) -> Iterator[str]:
    import yaml

    depth, key = 0, ""
    try:
        for event in yaml.parse(data, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
                key = "" if depth == 1 else key
            elif isinstance(event, yaml.ScalarEvent | yaml.AliasEvent):
                value = getattr(event, "value", "")
                if depth == 1 and not key:
                    key = value
                    continue
                if key == wanted and value:
                    yield value
                key = "" if depth == 1 else key
    except yaml.YAMLError:
        return  # what precedes the error was yielded
