"""What is a secret and what is not."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from reconciled.observe.redaction import REDACTED, Redactor, names_secret


@pytest.mark.parametrize(
    "name",
    [
        "password", "DB_PASSWORD", "db-password", "token", "access_token", "X-Api-Key", "secret",
        "client_secret", "Authorization", "Set-Cookie", "private_key", "credentials", "passphrase",
        "clientSecret", "userPassword",
    ],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    """Names under which secrets stand are known in the usual spellings."""
    assert names_secret(name)


@pytest.mark.parametrize("name", ["key", "run", "monkey", "tokenizer", "compass", "author"])
def test_names_of_other_things(name: str) -> None:
    """Our own fields, and words that only contain such a name, are shown."""
    assert not names_secret(name)


def test_values_in_disguise() -> None:
    """A registered value is found quoted, in base64, in a repr, and within another secret."""
    redactor = Redactor()
    secret = "p ss'w\\rd/ü"
    redactor.register(secret)
    redactor.register(secret + "-longer")
    for shape in (
        secret,
        quote(secret, safe=""),
        base64.b64encode(secret.encode()).decode(),
        repr(secret)[1:-1],
        secret + "-longer",
    ):
        assert redactor.redact(f"<{shape}>") == "<[redacted]>"


def test_lines_of_a_key_file() -> None:
    """Of a secret with several lines each line is hidden by itself."""
    redactor = Redactor()
    redactor.register("BEGIN\nMIIEabcdef\nEND\n")
    assert redactor.redact("line 2: MIIEabcdef") == "line 2: [redacted]"


def test_short_values_are_ignored() -> None:
    """A value too short to hide does not blank every text."""
    redactor = Redactor()
    redactor.register("a")
    redactor.register("")
    assert redactor.redact("banana") == "banana"
    assert repr(redactor) == "<Redactor 0 secrets>"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/x", "https://me:[redacted]@host/x"),
        ("redis://:pw@host", "redis://:[redacted]@host"),
        ("Authorization: Bearer abcdef.x", "Authorization: Bearer [redacted]"),
        ("https://host/a@b", "https://host/a@b"),
    ],
)
def test_credentials_with_a_form(text: str, shown: str) -> None:
    """Credentials that have a form of their own are hidden without being registered."""
    assert Redactor().redact(text) == shown


def test_what_stands_under_a_secret_name_anywhere_is_registered() -> None:
    """Texts of plain data under a name like DB_PASSWORD are hidden from then on, however deep."""
    redactor = Redactor()
    redactor.register_all({"environment": {"DB_PASSWORD": "hunter2hunter2", "HOST": "db.example"}})
    redactor.register_all({"steps": [{"token": "tok-123456"}]})
    shown = redactor.redact("pass=hunter2hunter2 at db.example with tok-123456")
    assert shown == f"pass={REDACTED} at db.example with {REDACTED}"
