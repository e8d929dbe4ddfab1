"""References to secrets: what shows of one, how it is read, and what is said where it cannot be."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from reconciled.core.errors import SecretUnavailable
from reconciled.service.credentials import (
    LARGEST,
    VARIABLE,
    Secret,
    passed_credentials,
    secrets_in,
    unavailable_reason,
)

VALUE = "tok-Q7x9-secret"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the manager has put one credential, ``token``."""
    made = tmp_path / "credentials"
    made.mkdir()
    (made / "token").write_text(VALUE + "\n")
    monkeypatch.setenv(VARIABLE, str(made))
    return made


def why(name: str = "token") -> str:
    with pytest.raises(SecretUnavailable) as caught:
        Secret(name).reveal()
    # What a traceback shows counts as shown.
    assert VALUE not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def test_a_secret_shows_its_name_alone(directory: Path) -> None:
    """What is printed, compared, hashed or written down of a secret is the reference to it."""
    secret = Secret("token")
    assert secret.reveal() == VALUE
    assert (repr(secret), str(secret)) == ("Secret(credential='token')",) * 2
    assert json.dumps(attrs.asdict(secret)) == '{"credential": "token"}'
    assert secret == Secret("token")
    assert hash(secret) == hash(Secret("token"))
    (directory / "token").write_text("another")
    assert secret == Secret("token")


@pytest.mark.parametrize(
    ("written", "text"),
    [(b"a b", "a b"), (b"a\n", "a"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b" a ", " a ")],
)
def test_one_line_end_is_no_part_of_a_text(directory: Path, written: bytes, text: str) -> None:
    """reveal() leaves out the line end that an editor adds, and nothing else; bytes are all."""
    (directory / "token").write_bytes(written)
    assert Secret("token").reveal() == text
    assert Secret("token").reveal_bytes() == written


def test_it_is_read_anew(directory: Path) -> None:
    """Nothing keeps a value: the next use sees what is there then."""
    secret = Secret("token")
    secret.reveal()
    (directory / "token").write_text("the next")
    assert secret.reveal() == "the next"


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o444])
def test_its_mode_is_the_managers_affair(directory: Path, mode: int) -> None:
    """Each version has modes of its own: none is refused."""
    (directory / "token").chmod(mode)
    assert Secret("token").reveal() == VALUE


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/shadow", "a:b", "a\nb", "é", "a" * 256]
)
def test_a_name_leads_nowhere_else(name: str) -> None:
    """A name that could lead out of the directory, or be none for the manager, is refused."""
    with pytest.raises(ValueError, match="the name of a credential"):
        Secret(name)


def test_what_is_not_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing credential, and a missing directory, are told with the line that brings it."""
    told = "credential other was not passed in: write LoadCredential=other:/etc/credstore/other"
    assert why("other").startswith(told)
    monkeypatch.delenv(VARIABLE)
    assert why("other").startswith(told)
    monkeypatch.setenv(VARIABLE, str(directory / "nowhere"))
    assert why("other").startswith(told)


def test_what_cannot_be_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, a directory, a pipe, too much and no text are told, and nothing is waited for."""
    (directory / "link").symlink_to(directory / "token")
    assert "cannot read credential link: Too many levels of symbolic links" in why("link")
    (directory / "inner").mkdir()
    assert "not a regular file" in why("inner")
    os.mkfifo(directory / "pipe")
    assert "not a regular file" in why("pipe")
    (directory / "large").write_bytes(b"x" * LARGEST)
    assert len(Secret("large").reveal()) == LARGEST
    (directory / "large").write_bytes(b"x" * (LARGEST + 1))
    assert "larger than 1 MiB" in why("large")
    (directory / "binary").write_bytes(VALUE.encode() + b"\xff")
    assert why("binary") == "credential binary is not valid UTF-8 text"
    assert Secret("binary").reveal_bytes().endswith(b"\xff")
    monkeypatch.setenv(VARIABLE, "credentials")
    assert "$CREDENTIALS_DIRECTORY is 'credentials', which is not an absolute path" in why()


def test_what_was_handed_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text of up to 64 KiB is given; what is binary, larger or no file is left out."""
    (directory / "a").write_text("é")
    (directory / "b").write_bytes(b"\xff")
    (directory / "c").write_text("x" * 65536)
    (directory / "d").write_text("x" * 65537)
    (directory / "e").symlink_to("a")
    assert list(passed_credentials()) == ["é", "x" * 65536, VALUE + "\n"]
    monkeypatch.delenv(VARIABLE)
    assert list(passed_credentials()) == []


@attrs.frozen
class Inner:
    token: Secret
    plain: str = ""


@attrs.frozen
class Outer:
    first: Secret | None = None
    named: Mapping[str, str | Secret] = attrs.field(factory=dict, alias="by_name")
    several: tuple[Inner, ...] = ()
    later: Any = attrs.field(init=False, default=Secret("kept"))


@pytest.mark.usefixtures("directory")
def test_secrets_are_found_where_they_stand() -> None:
    """Every secret of an object is found with its path as it was written; of others none is."""
    value = Outer(
        Secret("a"), {"x": "text", "y": Secret("b")}, (Inner(Secret("token")), Inner(Secret("c")))
    )
    assert list(secrets_in(value)) == [
        (("first",), Secret("a")),
        (("by_name", "y"), Secret("b")),
        (("several", 0, "token"), Secret("token")),
        (("several", 1, "token"), Secret("c")),
    ]
    assert list(secrets_in({"a": [1, "x", None]})) == []
    assert unavailable_reason(value).startswith("credential a was not passed in")
    assert unavailable_reason(Inner(Secret("token"))) == ""


def test_what_refers_to_itself_has_an_end() -> None:
    """An object that contains itself does not keep the search busy for ever."""
    loop: dict[str, Any] = {"secret": Secret("a")}
    loop["loop"] = loop
    assert {secret for _, secret in secrets_in(loop)} == {Secret("a")}
