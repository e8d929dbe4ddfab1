"""Keeping secrets out of everything that is written for people.

1. What stands under a name like password or token is never shown.
2. A registered value is shown nowhere, also not in its usual disguises (quoted, base64, repr).
3. Credentials with a form of their own are recognised anywhere: user:password@ in a URL, and
   what follows Bearer or Basic.

It comes before cutting long texts, so that no cut leaves half a secret unrecognised.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote

import attrs

REDACTED = "[redacted]"
# Shorter ones would blank half of every text, and protect nothing.
SHORTEST = 4
_NAME = re.compile(
    r"(?:^|[_\-. ])(?:pass(?:word|wd|phrase)|tokens?|secrets?|authorization|cookies?|credentials?"
    r"|(?:api|private|access)[_\-]?keys?)(?:$|[_\-. ])|(?:password|secret|apikey)s?$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
_SCHEME = re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{4,}", re.IGNORECASE)


# A memo of a pure function: the same few names come with every line.
@functools.lru_cache(maxsize=1024)
def names_secret(name: str) -> bool:
    """Whether a value under *name* is to be hidden whatever it is."""
    return _NAME.search(name) is not None


def _disguises(value: str) -> Iterable[str]:
    yield value
    yield repr(value)[1:-1]
    yield quote(value, safe="")
    yield base64.b64encode(value.encode("utf-8", "surrogateescape")).decode()
    if "\n" in value:  # a key file whose lines are shown one by one
        yield from (line.strip() for line in value.splitlines() if len(line.strip()) > SHORTEST)


@attrs.define(eq=False)
class Redactor:
    """The secrets known so far. Safe to read from any thread."""

    _pattern: re.Pattern[str] | None = attrs.field(default=None, init=False)
    _values: frozenset[str] = attrs.field(default=frozenset(), init=False)
    # Put together when the next text comes: thousands of keys may bring a secret each at once.
    _stale: bool = attrs.field(default=False, init=False)

    def __repr__(self) -> str:
        return f"<Redactor {len(self._values)} secrets>"

    def register(self, value: str) -> None:
        """Never show *value* again. Values under 4 characters cannot be hidden: ignored."""
        if len(value) < SHORTEST or value in self._values:
            return
        self._values |= {value}
        self._stale = True

    def register_all(self, data: object) -> None:
        """Register every text in plain *data* that stands under a name which names a secret."""
        if isinstance(data, Mapping):
            for name, value in data.items():
                if isinstance(value, str) and names_secret(str(name)):
                    self.register(value)
                else:
                    self.register_all(value)
        elif isinstance(data, list | tuple):
            for value in data:
                self.register_all(value)

    def _compile(self) -> None:
        self._stale = False
        shapes = {shape for known in self._values for shape in _disguises(known)}
        # Longest first: one secret may be a part of another.
        ordered = sorted(shapes, key=lambda shape: (-len(shape), shape))
        self._pattern = re.compile("|".join(map(re.escape, ordered)))

    def redact(self, text: str) -> str:
        """*text* without any secret in it."""
        if self._stale:
            self._compile()
        if self._pattern is not None:
            text = self._pattern.sub(REDACTED, text)
        # The substring tests cost a tenth of the expressions and nearly always say no.
        if "://" in text and "@" in text:
            text = _USERINFO.sub(rf"\1:{REDACTED}@", text)
        if "earer " in text or "asic " in text:
            text = _SCHEME.sub(rf"\1 {REDACTED}", text)
        return text
