"""Secrets as the service manager hands them in: known by name, read where they are used.

1. A Secret is a reference. All that can be compared, hashed, printed, written down or sent on of
   it is the name of its credential.
2. The value is read anew at each use, and nothing here keeps it. The manager holds it in memory,
   for this service alone, from a start to the next.
3. Owner and mode are not insisted on, for versions of the manager differ in them. What is read is
   a file of the directory itself, bounded, and found without following a link.

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
# Text beyond this is a bundle of certificates or an image: to look for it in each line of the
# log would cost more than it hides.
_LONGEST_HIDDEN = 64 * 1024
_MAX_DEPTH = 64  # as deep as a file may be nested
# What the manager takes for a name: it is a file's, and the part before a colon.
_NAME = re.compile(r"[ -.0-9;-~]{1,255}")


def _is_name(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in (".", ".."):
        raise ValueError(
            "takes the name of a credential: letters, digits, - and _, as in api-token", attribute
        )


@attrs.frozen
class Secret:
    """A reference to a secret, written ``{credential: NAME}``; reveal() gives the secret.

    Raises ValueError for what can be no name.
    """

    credential: str = attrs.field(validator=_is_name)

    def reveal(self) -> str:
        """Its text as of now, without the line end that editors add. Raises SecretUnavailable.

        Does not wait: the manager's files are in memory. Keep it for as long as it is needed.
        """
        try:
            text = self.reveal_bytes().decode()
        except UnicodeDecodeError:
            # The error has the bytes in it: not even as a cause may it go on.
            text = None
        if text is None:
            raise SecretUnavailable(f"credential {self.credential} is not text: it is no UTF-8")
        return text.removesuffix("\n").removesuffix("\r")

    def reveal_bytes(self) -> bytes:
        """Its bytes as of now, and all of them. Raises SecretUnavailable."""
        try:
            return _read(_directory(), self.credential)
        except FileNotFoundError as error:
            name = self.credential
            raise SecretUnavailable(
                f"credential {name} was not handed in: write LoadCredential={name}:"
                f"/etc/credstore/{name} in a drop-in of the unit, and restart it"
            ) from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            message = f"credential {self.credential} cannot be read: {why}"
            raise SecretUnavailable(message) from error


def passed_credentials() -> Iterator[str]:
    """Each credential that is a text of bounded size, for whoever has to hide them; none: none.

    Those that cannot be read are left out: whoever uses one is told.
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
        except (OSError, ValueError):  # no UTF-8 is the second
            continue


def secrets_in(
    value: object, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Secret]]:
    """The secrets that *value*, options or a spec as an object, refers to, and where they stand."""
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
    """Why the first secret in *value* that cannot be read cannot; empty: all of them can."""
    for _, secret in secrets_in(value):
        try:
            secret.reveal_bytes()
        except SecretUnavailable as error:
            return str(error)
    return ""


def _directory() -> str:
    """Where the manager has put them. Raises FileNotFoundError where it has put none."""
    directory = os.environ.get(VARIABLE, "")
    if not directory:
        raise FileNotFoundError
    if not directory.startswith("/"):
        raise ValueError(f"${VARIABLE} is {directory!r}, and no absolute path")
    return directory


def _read(directory: str, name: str) -> bytes:
    """Raises OSError, and ValueError for what is no file as the manager makes them."""
    above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Without blocking: a directory that was set by hand may have anything in it.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(name, flags, dir_fd=above)
    finally:
        os.close(above)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("it is no regular file")
        with os.fdopen(file, "rb", closefd=False) as opened:
            data = opened.read(LARGEST + 1)
    finally:
        os.close(file)
    if len(data) > LARGEST:
        raise ValueError("it is larger than 1 MiB")
    return data
