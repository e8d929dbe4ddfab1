"""References to credentials: their repr, reading their values, and errors."""

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
    """A credentials directory with one credential, ``token``."""
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


def test_a_secret_shows_only_its_name(directory: Path) -> None:
    """Repr, comparison, hash and serialisation of a secret use its reference, not its value."""
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
def test_one_trailing_newline_is_removed_from_a_text(
    directory: Path, written: bytes, text: str
) -> None:
    """A text loses the newline that an editor appends, and nothing else; bytes are unchanged."""
    (directory / "token").write_bytes(written)
    assert Secret("token").reveal() == text
    assert Secret("token").reveal_bytes() == written


def test_each_use_reads_the_value(directory: Path) -> None:
    """No value is cached: each use reads the file."""
    secret = Secret("token")
    secret.reveal()
    (directory / "token").write_text("the next")
    assert secret.reveal() == "the next"


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o444])
def test_any_file_mode_is_accepted(directory: Path, mode: int) -> None:
    """The modes of credentials differ between versions of systemd: all are accepted."""
    (directory / "token").chmod(mode)
    assert Secret("token").reveal() == VALUE


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/shadow", "a:b", "a\nb", "é", "a" * 256]
)
def test_a_name_with_a_path_is_refused(name: str) -> None:
    """A name that could leave the directory, or that the manager refuses, is refused."""
    with pytest.raises(ValueError, match="the name of a credential"):
        Secret(name)


def test_a_missing_credential_is_an_error_with_a_remedy(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing credential or directory is an error that names the directive to add."""
    expected = "credential other was not passed in: write LoadCredential=other:/etc/credstore/other"
    assert why("other").startswith(expected)
    monkeypatch.delenv(VARIABLE)
    assert why("other").startswith(expected)
    monkeypatch.setenv(VARIABLE, str(directory / "nowhere"))
    assert why("other").startswith(expected)


def test_an_unreadable_credential_is_an_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link, a directory, a pipe, a large file and non-text are errors, without blocking."""
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


def test_all_credentials_are_read_for_redaction(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text of up to 64 KiB is returned; binary and larger files are left out."""
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
def test_secrets_in_an_object_are_found_with_their_paths() -> None:
    """Every secret in an object is found with its path as written in the configuration."""
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


def test_a_cyclic_object_is_searched_once() -> None:
    """The search in an object that contains itself ends."""
    loop: dict[str, Any] = {"secret": Secret("a")}
    loop["loop"] = loop
    assert {secret for _, secret in secrets_in(loop)} == {Secret("a")}
