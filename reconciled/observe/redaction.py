"""Keeping secrets out of everything that is written for people.

1. What stands under a name like password or token is never shown.
2. A registered value is shown nowhere, also not in its usual disguises (quoted, base64, repr).
3. Credentials with a form of their own are recognised anywhere: user:password@ in a URL, and
   what follows Bearer or Basic.

4. A credential of the service manager is hidden whole, and so are the parts of it that could be
   secrets by themselves: a key file shown line by line, the token within a file of settings.

It comes before cutting long texts, so that no cut leaves half a secret unrecognised.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote

import attrs

REDACTED = "[redacted]"
# Shorter ones would blank half of every text, and protect nothing.
SHORTEST = 4
# Of a credential and its parts: "true" may well be one, and must not vanish from the log.
SHORTEST_CREDENTIAL = 6
_LONG = 512  # characters: to compile an expression of 64 KiB takes 80 ms, and finds nothing more
_REFERENCE = "credential"
_NAME = re.compile(
    r"(?:^|[_\-. ])(?:pass(?:word|wd|phrase)|tokens?|secrets?|authorization|cookies?|credentials?"
    r"|(?:api|private|access)[_\-]?keys?)(?:$|[_\-. ])|(?:password|secret|apikey)s?$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
# NAME: VALUE and NAME=VALUE as files of settings, JSON and URLs have them, one within another.
# Matches begin with a word, and look on for so long: 64 KiB take no longer than they must.
_SETTING = re.compile(
    r"""(?<![\w.-])([\w.-]++)["']?[ \t]*[:=][ \t]*"""
    r"""(?="([^"\n]{1,255})"|'([^'\n]{1,255})'|([^\s"'][^\n,;&}]{0,255}))"""
)
_WORD = re.compile(r"""(?<![\w+/.~-])[\w+/.~-]{16,}+={0,2}+(?!["']?:\s)""")
_RANDOM = re.compile(r"[0-9]|[a-z].*[A-Z]|[A-Z].*[a-z]")
_SCHEME = re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{4,}", re.IGNORECASE)


# A memo of a pure function: the same few names come with every line.
@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether a value under *name* is to be hidden whatever it is."""
    return _NAME.search(name) is not None


def _encodings(value: str) -> Iterator[str]:
    yield value
    yield repr(value)[1:-1]
    yield quote(value, safe="")
    yield base64.b64encode(value.encode("utf-8", "surrogateescape")).decode()


def _lines(value: str) -> Iterator[str]:
    """The lines of a key file, which may be shown one by one."""
    if "\n" in value:
        yield from (line.strip() for line in value.splitlines() if len(line.strip()) > SHORTEST)


def _parts(credential: str) -> Iterator[str]:
    """What of a credential may be a secret by itself; its keywords and addresses are not."""
    for name, *values in _SETTING.findall(credential):
        value = "".join(values).partition(" #")[0].strip()
        if is_secret_name(name) and len(value) >= SHORTEST_CREDENTIAL:
            yield value
    for word in _WORD.findall(credential):
        if not word.startswith("//") and _RANDOM.search(word):
            yield word


@attrs.define(eq=False)
class Redactor:
    """The secrets known so far. Safe to read from any thread."""

    _pattern: re.Pattern[str] | None = attrs.field(default=None, init=False)
    _values: frozenset[str] = attrs.field(default=frozenset(), init=False)
    _encoded_forms: set[str] = attrs.field(factory=set, init=False)
    _long: tuple[str, ...] = attrs.field(default=(), init=False)
    # Put together when the next text comes: thousands of keys may bring a secret each at once.
    _stale: bool = attrs.field(default=False, init=False)

    def __repr__(self) -> str:
        return f"<Redactor {len(self._values)} secrets>"

    def register(self, value: str) -> None:
        """Never show *value* again. Values under 4 characters cannot be hidden: ignored."""
        if len(value) >= SHORTEST and value not in self._values:
            self._add(value, _lines(value))

    def register_credential(self, text: str) -> None:
        """Never show *text*, all that a file has, nor what of it may be a secret by itself.

        Texts under 6 characters are ignored.
        """
        value = text.strip()
        if len(value) >= SHORTEST_CREDENTIAL and value not in self._values:
            self._add(value, _parts(value))

    def _add(self, value: str, parts: Iterable[str]) -> None:
        self._values |= {value}
        self._encoded_forms.update(_encodings(value), parts)
        self._stale = True

    def register_all(self, data: object) -> None:
        """Register every text in plain *data* that stands under a name which names a secret.

        Except in a reference, ``{credential: NAME}``: a name is what messages have to show.
        """
        if isinstance(data, Mapping) and data.keys() == {_REFERENCE}:
            return
        if isinstance(data, Mapping):
            for name, value in data.items():
                if isinstance(value, str) and is_secret_name(str(name)):
                    self.register(value)
                else:
                    self.register_all(value)
        elif isinstance(data, list | tuple):
            for value in data:
                self.register_all(value)

    def _compile(self) -> None:
        self._stale = False
        # Longest first: one secret may be a part of another.
        ordered = sorted(self._encoded_forms, key=lambda shape: (-len(shape), shape))
        self._long = tuple(shape for shape in ordered if len(shape) > _LONG)
        short = ordered[len(self._long) :]
        self._pattern = re.compile("|".join(map(re.escape, short))) if short else None

    def redact(self, text: str) -> str:
        """*text* without any secret in it."""
        if self._stale:
            self._compile()
        for shape in self._long:
            text = text.replace(shape, REDACTED)
        if self._pattern is not None:
            text = self._pattern.sub(REDACTED, text)
        # The substring tests cost a tenth of the expressions and nearly always say no.
        if "://" in text and "@" in text:
            text = _USERINFO.sub(rf"\1:{REDACTED}@", text)
        if "earer " in text or "asic " in text:
            text = _SCHEME.sub(rf"\1 {REDACTED}", text)
        return text
