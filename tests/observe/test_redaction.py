"""Which names and values are redacted."""

from __future__ import annotations

import base64
import time
from urllib.parse import quote

import pytest

from reconciled.observe.redaction import REDACTED, Redactor, is_secret_name


@pytest.mark.parametrize(
    "name",
    [
        "password", "DB_PASSWORD", "db-password", "token", "access_token", "X-Api-Key", "secret",
        "client_secret", "Authorization", "Set-Cookie", "private_key", "credentials", "passphrase",
        "clientSecret", "userPassword",
    ],
)  # fmt: skip
def test_names_of_secrets_are_recognised(name: str) -> None:
    """Names of secrets are recognised in the usual spellings."""
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["key", "run", "monkey", "tokenizer", "compass", "author"])
def test_similar_names_are_not_secret(name: str) -> None:
    """The daemon's own fields, and words that only contain such a name, are not redacted."""
    assert not is_secret_name(name)


def test_encoded_values_are_redacted() -> None:
    """A registered value is redacted when quoted, in base64, in a repr, and in another secret."""
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


def test_each_line_of_a_secret_is_redacted() -> None:
    """Each line of a secret with several lines is redacted separately."""
    redactor = Redactor()
    redactor.register("BEGIN\nMIIEabcdef\nEND\n")
    assert redactor.redact("line 2: MIIEabcdef") == "line 2: [redacted]"


def test_short_values_are_not_redacted() -> None:
    """A value of one character is not registered: it would blank every text."""
    redactor = Redactor()
    redactor.register("a")
    redactor.register("")
    assert redactor.redact("banana") == "banana"
    assert repr(redactor) == "<Redactor 0 secrets>"


KEY = """\
-----BEGIN PRIVATE KEY-----
MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7
/0Jp5vFq8pQm2sTz9aB4cD6eF7gH8iJ0kL1mN2oP3qR4sT5uV6w=
-----END PRIVATE KEY-----
"""
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters:
- cluster:
    certificate-authority-data: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0t
    server: https://kubernetes.example.internal:6443
  name: production
users:
- name: reconciled
  user:
    password: hunter22  # to be changed
    token: eyJhbGciOiJSUzI1NiIsImtpZCI6IiJ9.e30.c2ln
"""


@pytest.mark.parametrize(
    ("credential", "part"),
    [
        ("tok-123456\n", "tok-123456"),
        (KEY, "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7"),
        (KEY, "/0Jp5vFq8pQm2sTz9aB4cD6eF7gH8iJ0kL1mN2oP3qR4sT5uV6w="),
        (KEY, base64.b64encode(KEY.strip().encode()).decode()),
        (KEY, quote(KEY.strip(), safe="")),
        (KEY, repr(KEY.strip())[1:-1]),
        (KUBECONFIG, "hunter22"),
        (KUBECONFIG, "eyJhbGciOiJSUzI1NiIsImtpZCI6IiJ9.e30.c2ln"),
        ('{"client": "me", "client_secret": "s3cret-9"}', "s3cret-9"),
        ("USER=me\nDB_PASSWORD=horse battery staple\n", "horse battery staple"),
        ("https://example.org/hook?token=Zx81k0", "Zx81k0"),
        ("x1" * 32768, "x1" * 32768),
    ],
    ids=lambda text: repr(text[-24:]),
)
def test_a_credential_is_redacted_with_its_parts(credential: str, part: str) -> None:
    """A credential is redacted as a whole, and so is each part that could be a secret."""
    redactor = Redactor()
    redactor.register_credential(credential)
    assert part not in redactor.redact(f"the reply was {part}")
    assert redactor.redact(f"<{credential.strip()}>") in ("<[redacted]>", "<https://[redacted]>")


def test_a_credential_redacts_no_ordinary_words() -> None:
    """Keywords, addresses and short words of a credential are not redacted."""
    redactor = Redactor()
    for credential in (KUBECONFIG, "true\n", "5432", ""):
        redactor.register_credential(credential)
    text = (
        "apiVersion: v1, kind: Config of production for reconciled is true at port 5432:"
        " certificate-authority-data of https://kubernetes.example.internal:6443 is bad"
    )
    assert redactor.redact(text) == text


@pytest.mark.parametrize("unit", ["a1B2", "a=b=", "a:b ", "'\"", "==", "A1-\n"])
def test_a_large_credential_is_registered_quickly(unit: str) -> None:
    """Registering 64 KiB of any content takes a bounded time."""
    redactor = Redactor()
    before = time.process_time()
    redactor.register_credential(unit * (65536 // len(unit)))
    assert time.process_time() - before < 5.0
    before = time.process_time()
    redactor.redact("x")
    assert time.process_time() - before < 1.0


def test_the_name_of_a_credential_is_not_redacted() -> None:
    """The name in a reference is not redacted; values beside references are."""
    redactor = Redactor()
    redactor.register_all(
        {"environment": {"TOKEN": {"credential": "api-token"}, "PASSWORD": "hunter22"}}
    )
    assert redactor.redact("api-token and hunter22") == f"api-token and {REDACTED}"
    redactor.register_all({"credential": "tok-123456", "user": "me"})
    assert redactor.redact("tok-123456") == REDACTED


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/x", "https://me:[redacted]@host/x"),
        ("redis://:pw@host", "redis://:[redacted]@host"),
        ("Authorization: Bearer abcdef.x", "Authorization: Bearer [redacted]"),
        ("https://host/a@b", "https://host/a@b"),
    ],
)
def test_credentials_in_urls_and_headers_are_redacted(text: str, shown: str) -> None:
    """Passwords in URLs and bearer tokens are redacted without being registered."""
    assert Redactor().redact(text) == shown


def test_values_under_secret_names_are_registered() -> None:
    """Texts under a name like DB_PASSWORD are registered at any depth."""
    redactor = Redactor()
    redactor.register_all({"environment": {"DB_PASSWORD": "hunter2hunter2", "HOST": "db.example"}})
    redactor.register_all({"steps": [{"token": "tok-123456"}]})
    shown = redactor.redact("pass=hunter2hunter2 at db.example with tok-123456")
    assert shown == f"pass={REDACTED} at db.example with {REDACTED}"
