"""Where configuration and state are, found cheaply, and though the configuration may be invalid.

1. The rules are those of ``load``: the same file, the same directory, for whoever has to go on
   where the daemon cannot, as ``reap`` does after its end.
2. Nothing is judged here. What cannot be read says nothing; what stands before a mistake counts.
3. The parser is imported only where a file seems to name what is looked for: most leave that to
   the service manager, and then it costs more than all the rest.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_DEFAULT = Path("/etc/reconciled/reconciled.yaml")
# Where a service manager makes directories for configurations and for what a start needs.
_ETC, _RUN = Path("/etc"), Path("/run")
_SOCKET = "control.sock"
# Where nothing is said of it; a directory that is not there is no fault.
DEFAULT_INCLUDES = ("conf.d/*.yaml",)
# A key, wherever it stands but in a comment, which "#" begins after white space alone.
_KEY_PATTERN = rb"^(?:[^#\n]|(?<=\S)#)*\b%s[\"']?\s*:"


def find_config(argument: str | None, environ: Mapping[str, str]) -> Path:
    """Which file is the configuration; it need not exist."""
    chosen = argument or environ.get("RECONCILED_CONFIG")
    if chosen:
        return Path(os.path.normpath(Path.cwd() / chosen))
    directory = environ.get("CONFIGURATION_DIRECTORY", "").partition(":")[0]
    # systemd joins several directories with colons; the first is the one named first.
    return Path(directory) / "reconciled.yaml" if directory else _DEFAULT


def find_state(config: Path, environ: Mapping[str, str]) -> Path | None:
    """The state directory of a daemon that runs with *config*; None where nothing names one.

    As for the daemon: what the configuration says comes before $STATE_DIRECTORY. The other way
    round the programs of a daemon with a state directory of its own would belong to nobody.
    """
    for file in [config, *_included(config)]:
        for written in _top_level(file, "state"):
            return Path(os.path.normpath(file.parent / written))
    directory = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(directory) if directory else None


def find_socket(config: Path, environ: Mapping[str, str]) -> Path | None:
    """The control socket of a daemon that runs with *config*; None where nothing names one.

    Of the places where it may be, the first at which something is: whoever has just changed
    ``control.socket`` still gets to the daemon, which says that this takes a restart.
    """
    first = None
    # One by one: where the first is there, nobody has to read on.
    for each in _candidate_sockets(config, environ):
        if _may_exist(each):
            return each
        first = first or each
    return first  # none is there: this is the one that is missing


def _may_exist(path: Path) -> bool:
    """Whether something is at *path*, as far as who asks may know; whoever tries is told."""
    try:
        path.stat()
    except PermissionError:
        return True
    except (OSError, ValueError):  # nothing, a name that is too long, one with a NUL in it
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
        # A person at a terminal does not have the environment of the service that is meant, but
        # its manager names all of its directories alike, those of an instance too.
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
    """What *file* says of *wanted*: the word, or the words of the list."""
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
        return  # what came before it has been said
