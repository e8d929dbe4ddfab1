"""Documents: strict YAML within limits, every fault at its location (C14)."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciled.config.yaml.documents import MAX_DEPTH, MAX_NODES, MAX_PROBLEMS, read_documents
from reconciled.config.yaml.encoding import MAX_BYTES


def faults(data: bytes) -> list[str]:
    return [str(problem) for problem in read_documents(data, "f.yaml")[1]]


def only(data: bytes) -> object:
    documents, problems = read_documents(data, "f.yaml")
    assert problems == []
    (document,) = documents
    return document.data


def merge_bomb(levels: int) -> bytes:
    """The payload of yaml/pyyaml#897, in its short form: twice the keys at each level."""
    lines = ["L0: &L0 {k0: v}"]
    for level in range(1, levels + 1):
        below = level - 1
        lines.append(f"L{level}: &L{level} {{<<: [*L{below}, *L{below}], k{level}: v}}")
    return "\n".join(lines).encode()


def wide_merge_bomb() -> bytes:
    """The payload of yaml/pyyaml#897 as reported, as far as it fits into the size limit."""
    lines = ["L0: &L0 {k0_0: v0}"]
    for level in range(1, 17):
        below = level - 1
        keys = ", ".join(f"k{level}_{i}: v{level}" for i in range(1 << level))
        lines.append(f"L{level}: &L{level} {{<<: [*L{below}, *L{below}], {keys}}}")
    return "\n".join(lines).encode()


def alias_bomb() -> bytes:
    lines = ["a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    for above, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join(['*' + above] * 9)}]")
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("data", "place", "words"),
    [
        (b"a: 1\nb: 2\na: 3", "3:1", ["the key a is given twice", "line 1", "remove one"]),
        (b"a: {x: 1,\n x: 2}", "2:2", ["the key x is given twice"]),
        (b"country: no", "1:10", ["no is a boolean", "write false", '"no"']),
        (b"- On", "1:3", ["boolean", "write true", '"On"']),
        (b"a: True", "1:4", ["boolean", "write true", '"True"']),
        (b"no: a", "1:1", ["boolean", '"no"']),
        (b"mode: 0755", "1:7", ["octal", "0o755", '"0755"']),
        (b"mode: 0899", "1:7", ["octal", "899", '"0899"']),
        (b"port: 22:22", "1:7", ["base-60", '"22:22"']),
        (b"ver: 1.10", "1:6", ["lose its form", '"1.10"', "1.1 for the number"]),
        (b"ver: 1e3", "1:6", ["lose its form", '"1e3"', "1000.0"]),
        (b"a: 1_000", "1:4", ['"1_000"']),
        (b"a: 0b101", "1:4", ['"0b101"']),
        (b"a: .nan", "1:4", ["not a finite number", '".nan"']),
        (b"a: -.inf", "1:4", ["not a finite number"]),
        (b"a: 1" + b"0" * 400 + b".5", "1:4", ["too large"]),
        (b"a: 9223372036854775808", "1:4", ["64 bits"]),
        (b"a:\n\tb: 1", "2:1", ["a tab cannot indent: use spaces"]),
        (b"a: 1\nb: \x00", "2:4", ["NUL"]),
        ("ä: é\na: ".encode() + b"caf\xe9", "2:7", ["0xe9", "not UTF-8", "save"]),
        ("a: x".encode("utf-16"), "1:1", ["UTF-16", "save it as UTF-8"]),
        ("a: 1\nb: \ufeffx".encode(), "2:4", ["byte order mark", "delete"]),
        (b"a: \x07", "1:4", ["U+0007", "escape"]),
        (b"a: !!python/object:os.system x", "1:4", ["!!python/object:os.system", "remove"]),
        (b"a: !!python/object/apply:os.system [x]", "1:4", ["!!python/object/apply", "remove"]),
        (b"a: !local {}", "1:4", ["!local", "remove"]),
        (b"8080: x", "1:1", ['write "8080"']),
        (b"[a]: x\nb: c", "1:1", ["cannot be a key"]),
        (b"? {a: b}\n: [c]", "1:3", ["cannot be a key"]),
        (b"a: &x y\n*x : z", "2:1", ["alias as a key"]),
        (b"a: *nowhere", "1:4", ["no anchor &nowhere", '"*nowhere"']),
        (b"a: &x [*x]", "1:8", ["would never end"]),
        (b"a: {<<: 5}", "1:9", ["<< takes a mapping"]),
        (b"a: &x {b: c}\nd:\n  <<: *x\n  <<: *x", "4:3", ["a second <<", "[*first, *second]"]),
        (b"a: b: c", "1:5", ["second ':'", "quote the value"]),
        (b"a: [b,\n\nc: d\n", "1:4", ["[ ]", "close it with ']'"]),
        (b"a: {b: c\nd: e}", "2:2", ["{ }", "opened in line 1"]),
        (b"a: 'b\nc\n", "1:4", ["the file ends inside quotes"]),
        (b"a: @x", "1:4", ["@ cannot begin an unquoted value"]),
    ],
)
def test_c14_one_message_with_place_and_remedy(data: bytes, place: str, words: list[str]) -> None:
    """Each trap gives exactly one message: its line and column, what is wrong, what to write."""
    (message,) = faults(data)
    assert message.startswith(f"f.yaml:{place}: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize("text", ["y", "n", "Norway", "none", "2026-01-31", "1.2.3", "0o", "-"])
def test_c14_text_for_every_yaml_reader_is_text(text: str) -> None:
    """Words that only look special are text; a date is text because YAML 1.2 has no dates."""
    assert only(f"[{text}x, {text}]".encode() if text == "-" else f"a: {text}".encode()) in (
        {"a": text},
        ["-x", "-"],
    )


def test_c14_only_true_and_false_are_booleans() -> None:
    """Only true and false are booleans, quoted words never are; numbers keep their types."""
    data = b'[true, false, "no", 5, -5, 0x1f, 0o17, 1.5, ~, null, "", "0755"]'
    assert only(data) == [True, False, "no", 5, -5, 31, 15, 1.5, None, None, "", "0755"]


@pytest.mark.parametrize(
    "data",
    [b"\xef\xbb\xbfa: x\nb: |\n  1\n  2\n", b"a: x\r\nb: |\r\n  1\r\n  2\r\n"],
    ids=["BOM", "CRLF"],
)
def test_c14_bom_and_crlf_change_nothing(data: bytes) -> None:
    """A byte order mark and CRLF, as editors write them, do not change the content."""
    assert only(data) == {"a": "x", "b": "1\n2\n"}


@pytest.mark.parametrize("data", [b"", b"\n", b"# nothing\n"])
def test_c14_empty_file_has_no_documents(data: bytes) -> None:
    """A file without content has no documents; the caller decides what that means."""
    assert read_documents(data, "f.yaml") == ([], [])


@pytest.mark.parametrize(
    "data",
    [
        merge_bomb(22),
        wide_merge_bomb(),
        alias_bomb(),
        b"a: &a [" + b"{}, " * 3000 + b"]\nb:\n" + b"  - {<<: *a}\n" * 3000,
        b"a: &a {x: 1}\nb: {<<: [" + b"*a, " * 200_000 + b"]}",
        b"- " * (MAX_DEPTH + 1) + b"a",
        b"[" * 100_000,
        b"{a: " * 10_000,
        b"- a\n" * (MAX_NODES + 1),
        b"---\n" * (MAX_NODES + 1),
        b"a: " + b"9" * (MAX_BYTES - 10),
        b"x" * (MAX_BYTES + 1),
        b"a: !<" + b"x" * 1_000_000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_c14_limits(data: bytes) -> None:
    """Bombs and huge files give one short message, within 0.1 s."""
    before = time.process_time()
    (message,) = faults(data)
    assert time.process_time() - before < 5.0
    assert len(message) < 300


@pytest.mark.processes
@pytest.mark.parametrize(
    "data",
    [merge_bomb(22), alias_bomb(), b"x" * 50_000_000, b"[a]\n" * (MAX_BYTES // 4)],
    ids=lambda data: repr(data[:12]),
)
def test_c14_memory(data: bytes) -> None:
    """A bomb never takes 200 MB."""
    program = (
        "import re, sys\n"
        "from reconciled.config.yaml.documents import read_documents\n"
        "read_documents(sys.stdin.buffer.read(), 'f')\n"
        # Not ru_maxrss: exec keeps that of the process that forked, which is pytest here.
        "print(re.search(r'VmHWM:\\s+([0-9]+)', open('/proc/self/status').read())[1])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], input=data, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 200_000  # KiB


def test_just_within_the_limits() -> None:
    """A file that reaches a limit and does not exceed it is read."""
    assert faults(b"- a\n" * (MAX_NODES - 2)) == []
    assert faults(b"- " * (MAX_DEPTH - 1) + b"[a]") == []
    assert faults(b"a: '" + b"x" * (MAX_BYTES - 5) + b"'") == []


def test_all_problems_at_once() -> None:
    """All faults of a file are reported at once, in order of their locations."""
    found = faults(b"a: no\nb: 0755\n---\nc: [\n---\nd: yes\n")
    assert [message.split(":")[1] for message in found] == ["1", "2", "5", "6"]


def test_the_number_of_problems_is_limited() -> None:
    """A file with too many faults is reported as such, and reading stops."""
    found = faults(b"- no\n" * 100_000)
    assert len(found) == MAX_PROBLEMS + 1
    assert "further problems are not shown" in found[-1]


@pytest.mark.parametrize(
    "bad", [b"a: [1", b"a: 'x", b"a: b: c", b"a: no", b"%FOO", b"a:\n\tb", b"a: &x [*x]", b"?\t- ]"]
)
def test_a_broken_document_affects_only_itself(bad: bytes) -> None:
    """Documents before and after a broken one are read, with correct locations."""
    line = 6 + bad.count(b"\n")
    documents, problems = read_documents(b"a: 1\n---\n" + bad + b"\n---\nb: 2\nc: 3\n", "f")
    good = [document for document in documents if document.data in ({"a": 1}, {"b": 2, "c": 3})]
    assert [document.data for document in good] == [{"a": 1}, {"b": 2, "c": 3}]
    assert str(good[1].positions.value_origin(("c",))) == f"f:{line}:4"
    assert problems


def test_anchors_are_limited_to_their_document() -> None:
    """An alias never reaches into another document."""
    assert "no anchor &x" in faults(b"a: &x 1\n---\nb: *x\n")[0]


def test_merges() -> None:
    """A mapping's own keys win over merged ones, and the first merged mapping over later ones."""
    data = b"""
one: &one {a: 1, b: 1}
two: &two {b: 2, c: 2}
own: {<<: *one, a: 0}
both: {a: 0, <<: [*one, *two]}
quoted: {"<<": x}
"""
    value = only(data)
    assert isinstance(value, dict)
    assert value["own"] == {"a": 0, "b": 1}
    assert value["both"] == {"a": 0, "b": 1, "c": 2}
    assert value["quoted"] == {"<<": "x"}


def test_positions_are_exact() -> None:
    """Keys, values, elements and merged keys have the line and column at which they are written."""
    data = "ä: 1\nb:\n  - x\n  - {c:   d}\ne: &e {f: g}\nh: {<<: *e}\n".encode()
    ((document,), _) = read_documents(data, "f")
    positions = document.positions
    assert str(positions.value_origin()) == "f:1:1"
    assert str(positions.value_origin(("ä",))) == "f:1:4"
    assert str(positions.key_origin(("b",))) == "f:2:1"
    assert str(positions.value_origin(("b",))) == "f:3:3"
    assert str(positions.value_origin(("b", 0))) == "f:3:5"
    assert str(positions.key_origin(("b", 1, "c"))) == "f:4:6"
    assert str(positions.value_origin(("b", 1, "c"))) == "f:4:11"
    assert str(positions.value_origin(("h", "f"))) == "f:5:11"
    assert str(positions.value_origin(("b", 1, "missing", "deeper"))) == "f:4:5"


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn", "Co", "Cf"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("abcdefg-_.", min_size=1), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_json_is_read_as_the_same_data(value: object) -> None:
    """JSON is read as the same data: strictness refuses notations, not data."""
    assert only(json.dumps(value, ensure_ascii=False).encode()) == value


@given(
    st.binary(max_size=200) | st.text("abc:-[]{}&*<!|>'\"%@? \t\n#", max_size=80).map(str.encode)
)
def test_never_raises(data: bytes) -> None:
    """Any content gives documents and problems, and raises nothing."""
    documents, problems = read_documents(data, "f")
    assert all(problem.origin.line >= 1 and problem.message for problem in problems)
    assert all(document.positions.file == "f" for document in documents)
