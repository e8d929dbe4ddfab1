"""Removes secrets from everything that is written for people.

1. The value of a name like password or token is never shown.
2. A registered value is never shown, nor are its usual encodings (quoted, base64, repr).
3. Secrets of a recognisable form are redacted anywhere: user:password@ in a URL, and the text
   after Bearer or Basic.
4. A credential of the service manager is redacted whole, and so are its parts that can be secrets:
   a line of a key file, the token in a settings file.

Redact before truncating, so that no truncation leaves half a secret unrecognised.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote

import attrs

REDACTED = "[redacted]"
# Shorter values would redact half of every text, and protect nothing.
SHORTEST = 4
# For a credential and its parts: "true" may be one, and must not vanish from the log.
SHORTEST_CREDENTIAL = 6
_LONG = 512  # characters. A longer value is not compiled: an expression of 64 KiB takes 80 ms
_REFERENCE = "credential"
_NAME = re.compile(
    r"(?:^|[_\-. ])(?:pass(?:word|wd|phrase)|tokens?|secrets?|authorization|cookies?|credentials?"
    r"|(?:api|private|access)[_\-]?keys?)(?:$|[_\-. ])|(?:password|secret|apikey)s?$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
# NAME: VALUE and NAME=VALUE as in settings files, JSON and URLs, nested as well. A match begins
# at a word and its lookahead is bounded: 64 KiB stay fast.
_SETTING = re.compile(
    r"""(?<![\w.-])([\w.-]++)["']?[ \t]*[:=][ \t]*"""
    r"""(?="([^"\n]{1,255})"|'([^'\n]{1,255})'|([^\s"'][^\n,;&}]{0,255}))"""
)
_WORD = re.compile(r"""(?<![\w+/.~-])[\w+/.~-]{16,}+={0,2}+(?!["']?:\s)""")
_RANDOM = re.compile(r"[0-9]|[a-z].*[A-Z]|[A-Z].*[a-z]")
_SCHEME = re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{4,}", re.IGNORECASE)


# A memoized pure function: every line has the same few names.
@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether every value of *name* is to be redacted."""
    return _NAME.search(name) is not None


def _encodings(value: str) -> Iterator[str]:
    yield value
    yield repr(value)[1:-1]
    yield quote(value, safe="")
    yield base64.b64encode(value.encode("utf-8", "surrogateescape")).decode()


def _lines(value: str) -> Iterator[str]:
    """The lines of a key file, which a program may print one by one."""
    if "\n" in value:
        yield from (line.strip() for line in value.splitlines() if len(line.strip()) > SHORTEST)


def _parts(credential: str) -> Iterator[str]:
    """The parts of a credential that can be secrets; its keywords and addresses cannot."""
    for name, *values in _SETTING.findall(credential):
        value = "".join(values).partition(" #")[0].strip()
        if is_secret_name(name) and len(value) >= SHORTEST_CREDENTIAL:
            yield value
    for word in _WORD.findall(credential):
        if not word.startswith("//") and _RANDOM.search(word):
            yield word


@attrs.define(eq=False)
class Redactor:
    """The secrets registered so far. Any thread may call redact()."""

    _pattern: re.Pattern[str] | None = attrs.field(default=None, init=False)
    _values: frozenset[str] = attrs.field(default=frozenset(), init=False)
    _encoded_forms: set[str] = attrs.field(factory=set, init=False)
    _long: tuple[str, ...] = attrs.field(default=(), init=False)
    # Compiled at the next redact(): thousands of keys may register a secret each at once.
    _stale: bool = attrs.field(default=False, init=False)

    def __repr__(self) -> str:
        return f"<Redactor {len(self._values)} secrets>"

    def register(self, value: str) -> None:
        """Redact *value* from now on. Values under 4 characters are ignored."""
        if len(value) >= SHORTEST and value not in self._values:
            self._add(value, _lines(value))

    def register_credential(self, text: str) -> None:
        """Redact *text*, the content of a credential file, and its parts that can be secrets.

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
        """Register every text in plain *data* whose name says that it is a secret.

        Except for a reference, ``{credential: NAME}``: messages have to show the name.
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
        # The substring tests cost a tenth of the expressions and nearly always fail.
        if "://" in text and "@" in text:
            text = _USERINFO.sub(rf"\1:{REDACTED}@", text)
        if "earer " in text or "asic " in text:
            text = _SCHEME.sub(rf"\1 {REDACTED}", text)
        return text
