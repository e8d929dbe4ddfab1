"""Loads the configuration of a daemon: reads all of its files and checks them as a whole.

1. All or nothing: load() returns a complete configuration, or raises all problems of all files.
   It has no side effects, so that a failed reload changes nothing.
2. Every name is set once: two files that both set ``stop``, or the same controller, are an error
   that names both. No file overrides another, and the order of files has no meaning.
3. One document per file. Two documents would raise the question of 2 within one file, and a
   ``---`` in a configuration is usually a mistake. Manifest files may hold several documents.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs

from reconciled.config.controllers import read_controller
from reconciled.config.locations import DEFAULT_INCLUDES, find_config
from reconciled.config.model import (
    Config,
    ControlConfig,
    ControllerConfig,
    HttpConfig,
    JournalConfig,
    LimitsConfig,
    LogConfig,
    PluginsConfig,
    StopConfig,
)
from reconciled.config.structuring.faults import describe, guess, unknown_message
from reconciled.config.structuring.structurer import Structurer
from reconciled.config.trusted_files import read_trusted, untrusted_reason
from reconciled.config.watches import absolute
from reconciled.config.yaml.documents import Document, read_documents
from reconciled.config.yaml.positions import Path as Steps
from reconciled.config.yaml.positions import Positions, dotted
from reconciled.core.errors import Invalid
from reconciled.core.problems import Problem
from reconciled.core.resources import Origin

__all__ = ["LoadedConfig", "find_config", "load", "not_built_lines"]

_SECTIONS: dict[str, Any] = {
    "state": Path,
    "log": LogConfig,
    "stop": StopConfig,
    "limits": LimitsConfig,
    "journal": JournalConfig,
    "http": HttpConfig | None,
    "control": ControlConfig,
    "plugins": PluginsConfig,
}
_KEYS = (*_SECTIONS, "include", "controllers")
# Names that this version implements only in part, and what is missing.
NOT_BUILT: Mapping[str, str] = {
    "http": "serves /livez and /readyz in this version, and no metrics yet",
}


@attrs.frozen
class LoadedConfig:
    """A valid configuration, and warnings about it."""

    config: Config
    warnings: list[Problem]


def load(path: Path, environ: Mapping[str, str]) -> LoadedConfig:
    """Read the configuration *path* and the files that it includes.

    Blocks: call it in a thread. Raises Invalid with every problem found.
    """
    if not path.is_absolute():
        # Only the environment variable can: find_config() makes any other path absolute.
        message = f"is {str(path.parent)!r}: write an absolute path, or unset it"
        raise Invalid([Problem(Origin("$CONFIGURATION_DIRECTORY"), message)])
    loading = _Loader(environ)
    main = loading.read(path)
    if main is not None:
        for included in loading.included(main):
            loading.read(included)
    config = loading.config(path)
    if loading.problems or config is None:
        raise Invalid(loading.problems)
    return LoadedConfig(config, sorted(loading.warnings))


def not_built_lines(config: Config, names: Mapping[str, str] = NOT_BUILT) -> list[str]:
    """A line for each of *names* that is written in *config*: what of it is not implemented."""
    lines = []
    for path, origin in config.origins:
        for pattern, effect in names.items():
            if fnmatchcase(dotted(path), pattern):
                lines.append(f"{origin}: {dotted(path)} {effect}")
    return lines


@attrs.define(eq=False)
class _File:
    path: Path
    data: dict[str, Any]
    positions: Positions

    @property
    def base(self) -> Path:
        return self.path.parent


@attrs.define(eq=False)
class _Loader:
    environ: Mapping[str, str]
    problems: list[Problem] = attrs.Factory(list)
    warnings: list[Problem] = attrs.Factory(list)
    files: list[_File] = attrs.Factory(list)
    has_unread_file: bool = False  # a missing name may be set in the file that cannot be used
    structurer: Structurer = attrs.Factory(Structurer)

    def read(self, path: Path) -> _File | None:
        """Read one file and record its problems; None if nothing of it can be used."""
        document = self._document(path)
        if document is None:
            self.has_unread_file = True
            return None
        if not isinstance(document.data, dict):
            message = f"takes a mapping of {', '.join(_KEYS)}, got {describe(document.data)}"
            self.problems.append(document.positions.problem((), message))
            self.has_unread_file = True
            return None
        file = _File(path, document.data, document.positions)
        for key in document.data:
            if key not in _KEYS:
                message = unknown_message("key", key, _KEYS)
                self.problems.append(document.positions.problem_at_key((key,), message))
            elif key == "include" and self.files:
                message = "include is valid in the main file only: name the files there"
                self.problems.append(document.positions.problem_at_key((key,), message))
        self.files.append(file)
        return file

    def _document(self, path: Path) -> Document | None:
        name = str(path)
        try:
            data = read_trusted(path)
        except OSError as exc:
            self.problems.append(
                Problem(Origin(name), f"cannot be read: {_describe_os_error(exc, 'g+r')}")
            )
            return None
        except ValueError as exc:
            self.problems.append(Problem(Origin(name), str(exc)))
            return None
        documents, problems = read_documents(data, name)
        self.problems += problems
        if not problems and not documents:
            message = "is empty: write at least controllers: {}"
            self.problems.append(Problem(Origin(name), message))
        elif len(documents) > 1:
            message = "a second document: a configuration has one, so remove the '---'"
            self.problems.append(documents[1].positions.problem((), message))
        return documents[0] if documents else None

    def included(self, main: _File) -> list[Path]:
        """The files that ``include`` names: each once, sorted."""
        try:
            patterns = self.structurer.structure(
                tuple[Path, ...],
                main.data.get("include", [*DEFAULT_INCLUDES]),
                main.positions,
                ("include",),
            )
        except Invalid as exc:
            self.problems += exc.problems
            return []
        found: set[Path] = set()
        for index, pattern in enumerate(map(str, patterns)):
            whole = os.path.join(glob.escape(str(main.base)), pattern)  # noqa: PTH118 - a pattern
            matches = {Path(os.path.normpath(match)) for match in glob.glob(whole)}  # noqa: PTH207 - Path.glob takes no absolute pattern
            if not matches and (message := _unmatched_reason(main.base, pattern)):
                self.problems.append(main.positions.problem(("include", index), message))
            found |= matches
        return sorted(found - {main.path})

    def config(self, path: Path) -> Config | None:
        """The configuration from all files; None if a problem prevents one."""
        sections = {name: self._section(name, kind) for name, kind in _SECTIONS.items()}
        controllers = self._controllers()
        state = self._state(path, sections["state"])
        self._check_directories(sections["plugins"])
        if self.problems or state is None:
            return None
        if not controllers:
            message = "no controllers, so the daemon does nothing: add one under controllers"
            self.warnings.append(Problem(Origin(str(path)), message))
        control = sections["control"] or ControlConfig()
        return Config(
            state=state,
            controllers=controllers,
            control=control.socket or self._default_socket(state),
            log=sections["log"] or LogConfig(),
            stop=(sections["stop"] or StopConfig()).limits,
            limits=sections["limits"] or LimitsConfig(),
            journal=sections["journal"] or JournalConfig(),
            http=sections["http"],
            plugins=sections["plugins"] or PluginsConfig(),
            files=tuple(file.path for file in self.files),
            origins=tuple(entry for file in self.files for entry in _collect_origins(file)),
        )

    def _section(self, name: str, kind: Any) -> Any:
        """The value of the section *name* from the one file that has it; None if none has it."""
        holders = [file for file in self.files if name in file.data]
        if not holders:
            return None
        first = holders[0]
        for other in holders[1:]:
            self._report_duplicate((name,), first, other)
        try:
            value = self.structurer.structure(kind, first.data[name], first.positions, (name,))
        except Invalid as exc:
            self.problems += exc.problems
            return None
        return _resolve_paths(value, first.base)

    def _controllers(self) -> dict[str, ControllerConfig]:
        controllers: dict[str, ControllerConfig] = {}
        owners: dict[str, _File] = {}
        for file in self.files:
            written = file.data.get("controllers", {})
            if not isinstance(written, dict):
                message = f"takes a mapping of controllers by name, got {describe(written)}"
                self.problems.append(file.positions.problem(("controllers",), message))
                continue
            for name, data in written.items():
                if name in owners:
                    self._report_duplicate(("controllers", name), owners[name], file)
                    continue
                owners[name] = file
                try:
                    controllers[name] = read_controller(
                        self.structurer, name, data, file.positions, file.base
                    )
                except Invalid as exc:
                    self.problems += exc.problems
        return controllers

    def _report_duplicate(self, path: Steps, first: _File, other: _File) -> None:
        message = (
            f"{path[-1]} is given in two files, first at {first.positions.key_origin(path)}: "
            "remove one of them"
        )
        self.problems.append(other.positions.problem_at_key(path, message))

    def _state(self, path: Path, written: Path | None) -> Path | None:
        if written is not None:
            return written
        if (directory := self._environment_directory("STATE_DIRECTORY")) is not None:
            return directory
        misspelt = any(guess(key, ("state",)) for file in self.files for key in file.data)
        if not misspelt and not self.has_unread_file and "STATE_DIRECTORY" not in self.environ:
            message = (
                "state is missing, and $STATE_DIRECTORY is not set: add state: /var/lib/reconciled"
            )
            self.problems.append(Problem(Origin(str(path)), message))
        return None

    def _default_socket(self, state: Path) -> Path:
        return (self._environment_directory("RUNTIME_DIRECTORY") or state) / "control.sock"

    def _environment_directory(self, variable: str) -> Path | None:
        """The first of the directories in *variable*, as the service manager sets it."""
        written = self.environ.get(variable)
        first = (written or "").partition(":")[0]
        if written is None or first.startswith("/"):
            return Path(first) if first else None
        message = f"is {written!r}: write an absolute path, or unset it"
        self.problems.append(Problem(Origin(f"${variable}"), message))
        return None

    def _check_directories(self, plugins: PluginsConfig | None) -> None:
        for index, directory in enumerate(plugins.directories if plugins else ()):
            file = next(file for file in self.files if "plugins" in file.data)
            path: Steps = ("plugins", "directories", index)
            try:
                os.scandir(directory).close()
                reason = untrusted_reason(directory, directory.stat())
            except PermissionError as exc:
                reason = f"{directory} cannot be listed: {_describe_os_error(exc, 'g+rx')}"
            except OSError as exc:
                message = f"{directory} cannot be used: {exc.strerror}"
                self.warnings.append(file.positions.problem(path, message))
                continue
            if reason is not None:
                self.problems.append(file.positions.problem(path, reason))


def _describe_os_error(error: OSError, mode: str) -> str:
    """The text of *error*; *mode* is what chmod has to grant for the daemon's user."""
    if not isinstance(error, PermissionError):
        return str(error.strerror or error)
    return (
        f"{error.strerror} for uid {os.geteuid()}:"
        f" chgrp it to a group of that user, and chmod {mode}"
    )


def _unmatched_reason(base: Path, pattern: str) -> str:
    """Why it is an error that *pattern* matches nothing; empty: it is not an error.

    A directory that exists and cannot be listed must not count as empty: the controllers in it
    would be treated as removed.
    """
    directory = base
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part):
            break
        directory /= part
    try:
        os.scandir(directory).close()
    except PermissionError as exc:
        return f"{directory} cannot be listed: {_describe_os_error(exc, 'g+rx')}"
    except OSError:
        pass  # it does not exist
    if glob.has_magic(pattern):
        return ""
    return f"{pattern} does not exist: create it, or remove it here"


def _resolve_paths(value: Any, base: Path) -> Any:
    """*value* with absolute paths: a relative path starts at the directory of its file."""
    if isinstance(value, Path):
        return absolute(base, value)
    if isinstance(value, ControlConfig) and value.socket is not None:
        return ControlConfig(absolute(base, value.socket))
    if isinstance(value, PluginsConfig):
        return PluginsConfig(tuple(absolute(base, path) for path in value.directories))
    return value


def _collect_origins(file: _File) -> list[tuple[Steps, Origin]]:
    """Every name of *file* down to the third level, the deepest that a configuration has."""
    paths: list[Steps] = []
    for first, section in file.data.items():
        paths.append((first,))
        for second, value in section.items() if isinstance(section, dict) else ():
            paths.append((first, second))
            paths += [(first, second, third) for third in value] if isinstance(value, dict) else []
    return [(path, file.positions.key_origin(path)) for path in paths]
