"""Structuring: strict types, all faults at once, each at its location."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciled.config.structuring.field_types import Share, at_least, parse_share
from reconciled.config.structuring.structurer import Structurer
from reconciled.config.yaml.documents import read_documents
from reconciled.config.yaml.positions import Location, Positions
from reconciled.core.durations import Seconds, format_duration
from reconciled.core.errors import Invalid
from reconciled.service.credentials import Secret

Name = NewType("Name", str)


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen
class Inner:
    size: int = attrs.field(default=1, validator=at_least(1))
    nested: Inner | None = None


def structure(cls: Any, data: Any, positions: Positions | None = None) -> Any:
    """*data* as a *cls*."""
    return Structurer().structure(cls, data, positions or Positions("f", Location(1, 1)))


def read(kind: Any, text: str) -> Any:
    """*text* as a class with one field, *it*."""
    holder = attrs.make_class("Holder", {"it": attrs.field(type=kind)})
    ((document,), problems) = read_documents(f"it: {text}".encode(), "f")
    assert problems == []
    return structure(holder, document.data, document.positions).it


def fault_of(kind: Any, text: str) -> str:
    with pytest.raises(Invalid) as caught:
        read(kind, text)
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (str, "x", "x"),
        (int, "5", 5),
        (float, "1.5", 1.5),
        (float, "2", 2.0),
        (bool, "true", True),
        (int | None, "null", None),
        (str | int, "5", 5),
        (str | list[str], "[a]", ["a"]),
        (Inner | str, "{size: 2}", Inner(2)),
        (list[int], "[1, 2]", [1, 2]),
        (tuple[str, ...], "[a]", ("a",)),
        (tuple[int, str], "[1, a]", (1, "a")),
        (set[str], "[a, a]", {"a"}),
        (Sequence[str], "[a]", ("a",)),
        (dict[str, int], "{a: 1}", {"a": 1}),
        (Mapping[str, Inner], "{a: {}}", {"a": Inner()}),
        (Inner, "{nested: {size: 3}}", Inner(1, Inner(3))),
        (Color, "red", Color.RED),
        (Literal["a", 1], "1", 1),
        (Name, "x", "x"),
        (Annotated[int, "note"], "5", 5),
        (Path, "/x", Path("/x")),
        (Seconds, "1m30s", 90.0),
        (Share, "12.5%", 0.125),
        (Secret, "{credential: api-token}", Secret("api-token")),
        (Secret | None, "null", None),
        (dict[str, str | Secret], "{a: x, b: {credential: y}}", {"a": "x", "b": Secret("y")}),
        (Any, "{a: [1]}", {"a": [1]}),
    ],
)
def test_reads(kind: Any, text: str, value: object) -> None:
    """Every type that specs need is read, into exactly the value and type that is declared."""
    result = read(kind, text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (str, "5", 'takes text, got the number 5: write "5"'),
        (str, "true", 'got true: write "true"'),
        (str, "", "got nothing"),
        (str, "[a]", "got a list"),
        (int, '"5"', "write 5 without quotes"),
        (int, "1.5", "takes a whole number"),
        (int, "true", "takes a whole number, got true"),
        (float, "true", "takes a number, got true"),
        (float, "x", "takes a number"),
        (bool, "1", "takes true or false, got the number 1"),
        (bool, '"true"', "takes true or false, got text"),
        (list[str], "abc", "put [ ] around it"),
        (list[str], "", "write [] for an empty one"),
        (list[str], "{a: b}", "takes a list, got a mapping"),
        (set[str], "abc", "takes a list"),
        (tuple[int, str], "[1]", "takes a list of 2 elements, got 1"),
        (dict[str, int], "", "write {} for an empty one"),
        (dict[str, int], "[a]", "takes a mapping"),
        (str | int, "1.5", 'takes text or a whole number, got the number 1.5: write "1.5"'),
        (Secret, "", "takes a reference to a secret and never the secret itself: write {cred"),
        (Secret, "{}", "names no credential: write {credential: NAME}"),
        (Secret, "{credentials: x}", "f:1:6: unknown key credentials: did you mean credential?"),
        (Secret, "{credential: x, y: z}", "f:1:21: unknown key y"),
        (Secret, "{credential: 5}", "f:1:18: it.credential: is not the name of a credential"),
        (Secret, "{credential: ../x}", "f:1:18: it.credential: is not the name of a credential"),
        (str | Secret, "[x]", "takes text or {credential: NAME}, got a list"),
        (str | Secret, "{secret: x}", "unknown key secret"),
        (int | None, "x", "takes a whole number"),
        (Color, "rad", "did you mean red?"),
        (Color, "5", "takes one of red, blue"),
        (Literal["auto", "json"], "jsn", "did you mean json?"),
        (Literal[1], "true", "takes one of 1"),
        (Name, "5", "takes text"),
        (Annotated[str, "note"], "5", "takes text"),
        (Path, '""', "takes a path"),
        (Path, '"a\\0b"', "no path has the character NUL in it"),
        (Seconds, "60", "write 1m30s, or 60s if seconds are meant"),
        (Seconds, "1 m", "as in 1m30s"),
        (Share, "50", "write it as in 50%"),
        (Share, "101%", "from 0% to 100%"),
        (Inner, "{size: 0}", "at least 1"),
        (bytes, "x", "cannot be read as bytes"),
        (threading_lock := type("Lock", (), {}), "x", "cannot be read as Lock"),
    ],
)
def test_nothing_is_coerced(kind: Any, text: str, words: str) -> None:
    """A value of another type is refused in one message that says what to write."""
    assert words in fault_of(kind, text)


def test_secrets_stay_out_of_messages() -> None:
    """A text where none is valid is not quoted: it may be a secret."""
    assert "hunter2" not in fault_of(int, "hunter2")
    assert "hunter2" not in fault_of(list[str], "hunter2")
    for written in ("hunter2", "[hunter2]", '"hunter2"'):
        assert "hunter2" not in fault_of(Secret, written)
    assert "4711" not in fault_of(Secret, "4711")
    assert "hunter/2" not in fault_of(Secret, "{credential: hunter/2}")


def test_all_faults_are_reported_at_once() -> None:
    """All faults of nested data are reported at once, with line and column of key or value."""

    @attrs.frozen
    class Outer:
        needed: str
        other: str
        max_size: int = 0
        inner: Inner = attrs.Factory(Inner)
        list_of: list[Inner] = attrs.Factory(list)

    text = b"""other: x
maxSize: 5
inner:
  size: "1"
  nested: {siez: 1}
list_of:
  - {size: 0}
  - 5
"""
    ((document,), _) = read_documents(text, "f")
    with pytest.raises(Invalid) as caught:
        structure(Outer, document.data, document.positions)
    assert [str(problem) for problem in caught.value.problems] == [
        "f:1:1: needed is missing: add needed",
        "f:2:1: unknown key maxSize: did you mean max_size?",
        "f:4:9: inner.size: takes a whole number, got text: write 1 without quotes",
        "f:5:12: unknown key siez: did you mean size?",
        "f:7:12: list_of[0].size: must be at least 1, got 0",
        "f:8:5: list_of[1]: takes a mapping of size, nested, got the number 5",
    ]


def test_all_validators_are_reported_at_once() -> None:
    """The faults of all validators are reported together with all other faults."""

    @attrs.frozen
    class Spec:
        least: int = attrs.field(default=1, validator=at_least(1))
        most: int = attrs.field(default=1, validator=at_least(1))
        text: str = ""

    with pytest.raises(Invalid) as caught:
        structure(Spec, {"least": 0, "most": 0, "text": 5})
    assert len(caught.value.problems) == 3


def test_a_misspelt_key_is_one_fault() -> None:
    """A required key that was misspelt is not reported as missing too."""
    needed = attrs.make_class("Needed", {"content": attrs.field(type=str)})
    with pytest.raises(Invalid, match="did you mean content") as caught:
        structure(needed, {"contnet": "x"})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("error", [ValueError, KeyError, SystemExit, KeyboardInterrupt, Exception])
def test_what_a_class_raises_is_a_fault_of_the_value(error: type[BaseException]) -> None:
    """Validators may be plugin code: what they raise is a problem of that value alone (C15)."""

    @attrs.frozen
    class Spec:
        mode: str = "x"

        def __attrs_post_init__(self) -> None:
            raise error("no such mode")

    with pytest.raises(Invalid, match="no such mode"):
        structure(Spec, {})


def test_a_validator_of_attrs_is_placed_at_its_field() -> None:
    """The validators of attrs name their attribute, so the fault is at its field."""

    @attrs.frozen
    class Spec:
        path: str = attrs.field(default="", validator=attrs.validators.matches_re("/.*"))

    ((document,), _) = read_documents(b"\npath:   x", "f")
    with pytest.raises(Invalid, match=r"^f:2:9: path: "):
        structure(Spec, document.data, document.positions)


def test_classes_of_the_same_name_are_structured_separately() -> None:
    """After a reload, an old and a new class of the same name are both structured correctly."""
    structurer = Structurer()
    old = attrs.make_class("Spec", {"a": attrs.field(type=int)})
    new = attrs.make_class("Spec", {"b": attrs.field(type=int)})
    ((document,), _) = read_documents(b"{}", "f")
    assert structurer.structure(old, {"a": 1}, document.positions).a == 1
    assert structurer.structure(new, {"b": 1}, document.positions).b == 1


@given(st.integers(0, 366 * 86_400_000))
def test_durations_round_trip(milliseconds: int) -> None:
    """A duration that is written is read as the same number of seconds, to the millisecond."""
    seconds = read(Seconds, format_duration(milliseconds / 1000))
    assert round(seconds * 1000) == milliseconds


@given(st.text("0123456789.msh%d -+e", max_size=8))
def test_durations_and_shares_need_their_unit(text: str) -> None:
    """A share needs a %, and has no sign, exponent or space."""
    try:
        share = parse_share(text)
    except ValueError:
        return
    assert text.endswith("%")
    assert not set(text) & set("-+e ")
    assert 0 <= share <= 1
