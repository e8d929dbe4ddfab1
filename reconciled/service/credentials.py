"""Secrets as credentials of the service manager: referred to by name, read where they are used.

1. A Secret is a reference. Comparison, hash, repr and serialisation contain the name of its
   credential only.
2. The value is read at each use, and is not kept here. The manager holds it in memory, for this
   service alone, from one start to the next.
3. Owner and mode are not checked, since versions of the manager differ in them. Only a regular file
   of the directory itself is read, up to a limit, without following a link.

Rejected: secrets in the daemon's own environment, which every program of every key would inherit.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from reconciled.core.errors import SecretUnavailable

VARIABLE = "CREDENTIALS_DIRECTORY"
LARGEST = 1024 * 1024  # bytes: the manager's own limit
# A longer text is a bundle of certificates or an image: to search each line of the log for it
# would cost more than it protects.
_LONGEST_HIDDEN = 64 * 1024
_MAX_DEPTH = 64  # the nesting limit of configuration files
# The names that the manager accepts: a file name, and the part before a colon.
_NAME = re.compile(r"[ -.0-9;-~]{1,255}")


def _is_name(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in (".", ".."):
        raise ValueError(
            "is not the name of a credential: write letters, digits, - and _, as in api-token",
            attribute,
        )


@attrs.frozen
class Secret:
    """A reference to a secret, written ``{credential: NAME}``; reveal() returns the secret.

    Raises ValueError for an invalid name.
    """

    credential: str = attrs.field(validator=_is_name)

    def reveal(self) -> str:
        """The present text, without the line end that editors add. Raises SecretUnavailable.

        Does not wait: the manager's files are in memory. Do not keep it longer than needed.
        """
        try:
            text = self.reveal_bytes().decode()
        except UnicodeDecodeError:
            # The error contains the bytes: it must not be raised, not even as a cause.
            text = None
        if text is None:
            raise SecretUnavailable(f"credential {self.credential} is not valid UTF-8 text")
        return text.removesuffix("\n").removesuffix("\r")

    def reveal_bytes(self) -> bytes:
        """The present bytes, complete. Raises SecretUnavailable."""
        try:
            return _read(_directory(), self.credential)
        except FileNotFoundError as error:
            name = self.credential
            raise SecretUnavailable(
                f"credential {name} was not passed in: write LoadCredential={name}:"
                f"/etc/credstore/{name} in a drop-in of the unit, and restart it"
            ) from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            message = f"cannot read credential {self.credential}: {why}"
            raise SecretUnavailable(message) from error


def passed_credentials() -> Iterator[str]:
    """The text of each credential that is UTF-8 and not too long, for the redactor.

    A credential that cannot be read is left out: its use raises SecretUnavailable.
    """
    try:
        directory = _directory()
        names = sorted(path.name for path in Path(directory).iterdir())
    except (OSError, ValueError):
        return
    for name in names:
        try:
            data = _read(directory, name)
            if len(data) <= _LONGEST_HIDDEN:
                yield data.decode()
        except (OSError, ValueError):  # ValueError: not UTF-8
            continue


def secrets_in(
    value: object, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Secret]]:
    """The secrets that *value*, options or a spec as an object, refers to, each with its path."""
    kind: Any = type(value)
    if isinstance(value, Secret):
        yield path, value
    elif len(path) >= _MAX_DEPTH:
        return
    elif attrs.has(kind):
        for field in attrs.fields(kind):
            if field.init:
                inner = getattr(value, field.name, None)
                yield from secrets_in(inner, (*path, field.alias or field.name))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from secrets_in(inner, (*path, str(name)))
    elif isinstance(value, list | tuple | set | frozenset):
        for index, inner in enumerate(value):
            yield from secrets_in(inner, (*path, index))


def unavailable_reason(value: object) -> str:
    """The error of the first secret in *value* that cannot be read; empty: all can be read."""
    for _, secret in secrets_in(value):
        try:
            secret.reveal_bytes()
        except SecretUnavailable as error:
            return str(error)
    return ""


def _directory() -> str:
    """The manager's directory of credentials. Raises FileNotFoundError where there is none."""
    directory = os.environ.get(VARIABLE, "")
    if not directory:
        raise FileNotFoundError
    if not directory.startswith("/"):
        raise ValueError(f"${VARIABLE} is {directory!r}, which is not an absolute path")
    return directory


def _read(directory: str, name: str) -> bytes:
    """Raises OSError, and ValueError for a file that the manager cannot have created."""
    above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Without blocking: a directory that a person set may contain a FIFO.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(name, flags, dir_fd=above)
    finally:
        os.close(above)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("not a regular file")
        with os.fdopen(file, "rb", closefd=False) as opened:
            data = opened.read(LARGEST + 1)
    finally:
        os.close(file)
    if len(data) > LARGEST:
        raise ValueError("larger than 1 MiB")
    return data
