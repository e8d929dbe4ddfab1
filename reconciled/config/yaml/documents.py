"""Reads YAML documents as plain data with positions, strictly and within limits.

Built from the parser's events, not from its nodes: composing nodes recurses in C, gives no way
to count what an alias brings in, and cannot continue after a broken document.

1. Every mapping key is text and unique. Tags are refused, so that data never becomes code.
2. Aliases and merge keys (``<<``) are allowed, and each counts with all that it brings in:
   a file never has more than MAX_NODES keys, values and documents, however it is written
   (yaml/pyyaml#897).
3. All problems of a file are reported at once. After a syntax error reading continues at the
   next ``---``, so that a broken document affects only itself.
4. If a mapping and what it merges have a key in common, the mapping's own value wins, then that
   of the merged mapping that is named first (the merge key's specification).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs
import yaml

from reconciled.config.yaml.encoding import decode
from reconciled.config.yaml.positions import Location, Positions
from reconciled.config.yaml.scalars import parse_plain
from reconciled.config.yaml.syntax_errors import syntax_fault
from reconciled.core.errors import Invalid
from reconciled.core.problems import Problem
from reconciled.core.resources import Origin

MAX_NODES = 100_000
MAX_DEPTH = 64
MAX_PROBLEMS = 50

_NEXT_DOCUMENT = re.compile(r"^---(?=[ \t\r\n]|\Z)", re.MULTILINE)
_MERGE = "<<"


@attrs.frozen(eq=False)
class Document:
    """One document: None, a scalar, or lists and dicts of them; aliases share objects."""

    data: Any
    positions: Positions


class _LimitExceeded(Exception):
    """The file exceeds a limit: reading stops."""


@attrs.define(eq=False)
class _OpenCollection:
    """A collection whose end event has not come yet."""

    data: Any
    location: Location
    anchor: str | None
    before: int  # the count of keys and values before it
    key: str | None = None
    key_location: tuple[int, int] = (0, 0)
    merged: tuple[Any, Location] | None = None
    in_value: bool = False
    is_key: bool = False  # a collection as a key, which is refused: parsed and dropped


@attrs.define(eq=False)
class _Anchor:
    data: Any
    location: Location
    size: int


def read_documents(data: bytes, file: str) -> tuple[list[Document], list[Problem]]:
    """The valid documents of *data*, and the problems of the others.

    Raises nothing whatever the content. A file that is empty or has only comments has no documents.
    """
    try:
        text = decode(data, file)
    except Invalid as exc:
        return [], exc.problems
    reader = _Reader(file)
    documents: list[Document] = []
    try:
        start: int | None = 0
        while start is not None:
            start = reader.read(text, start, documents)
    except _LimitExceeded:
        pass
    return documents, sorted(reader.problems)


@attrs.define(eq=False)
class _Reader:
    file: str
    problems: list[Problem] = attrs.Factory(list)
    line_offset: int = 0  # lines before the part that is being read
    count: int = 0  # keys, values and documents so far
    document_start: int = 0  # index of the current document in that part
    faults: int = 0  # number of problems in the documents before
    open: list[_OpenCollection] = attrs.Factory(list)
    anchors: dict[str, _Anchor | None] = attrs.Factory(dict)

    def read(self, text: str, start: int, documents: list[Document]) -> int | None:
        """Read from *start*; return the index at which to continue after a syntax error."""
        part = text[start:] if start else text
        self.line_offset = text.count("\n", 0, start)
        self.document_start = 0
        self.open.clear()
        try:
            for event in yaml.parse(part, Loader=yaml.CSafeLoader):
                self._handle_event(event, documents)
        except yaml.MarkedYAMLError as exc:
            mark = exc.problem_mark or exc.context_mark
            # The type stub lacks it; the marks of both parsers have an index.
            index = getattr(mark, "index", len(part))
            self._problem(*syntax_fault(exc, part, index, self.line_offset))
            match = _NEXT_DOCUMENT.search(part, max(index, self.document_start + 1))
            return start + match.start() if match is not None else None
        return None

    def _handle_event(self, event: Any, documents: list[Document]) -> None:
        kind = type(event)
        if kind is yaml.ScalarEvent:
            self._scalar(event)
        elif kind is yaml.MappingStartEvent:
            self._begin(event, {})
        elif kind is yaml.SequenceStartEvent:
            self._begin(event, [])
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            self._end(documents)
        elif kind is yaml.AliasEvent:
            self._alias(event)
        elif kind is yaml.DocumentStartEvent:
            self._count(event)
            self.document_start = event.start_mark.index
            self.faults = len(self.problems)
            self.anchors.clear()
        if not self.open and kind is yaml.ScalarEvent:
            self._top_scalar(event, documents)

    def _scalar(self, event: Any) -> None:
        self._count(event)
        text: str = event.value
        top = self.open[-1] if self.open else None
        is_plain = event.implicit[0] and event.tag is None
        if event.tag is not None:
            self._refuse_tag(event)
        if top is not None and type(top.data) is dict and not top.in_value:
            self._key(top, event, text, is_plain=is_plain)
            return
        value: Any = self._parse_plain(event, text) if is_plain else text
        location = self._location(event.start_mark)
        if event.anchor is not None:
            self.anchors[event.anchor] = _Anchor(value, location, 1)
        if top is not None:
            self._add(top, value, location)

    def _top_scalar(self, event: Any, documents: list[Document]) -> None:
        """Finish a document that is one scalar; callers refuse it, since it is not a mapping."""
        if len(self.problems) > self.faults:
            return
        value = parse_plain(event.value) if event.implicit[0] else event.value
        location = self._location(event.start_mark)
        documents.append(Document(value, Positions(self.file, location)))

    def _parse_plain(self, event: Any, text: str) -> Any:
        try:
            return parse_plain(text)
        except ValueError as exc:
            self._problem(event.start_mark, str(exc))
            return text

    def _key(self, top: _OpenCollection, event: Any, text: str, *, is_plain: bool) -> None:
        mark = event.start_mark
        top.in_value = True
        top.key, top.key_location = text, (mark.line + 1 + self.line_offset, mark.column + 1)
        if is_plain and text == _MERGE:
            top.key = None
            if top.merged is not None:
                self._problem(mark, "a second << in one mapping: write <<: [*first, *second]")
            return
        if is_plain and not isinstance(self._parse_plain(event, text), str):
            self._problem(mark, f'keys are text: write "{text}" for {text or "an empty key"}')
        if text in top.data and top.location.parts is not None:
            line = top.location.parts[text][0]
            self._problem(mark, f"the key {text} is given twice, first in line {line}: remove one")

    def _begin(self, event: Any, data: Any) -> None:
        self._count(event)
        if len(self.open) >= MAX_DEPTH:
            self._problem(event.start_mark, f"nested deeper than {MAX_DEPTH} levels: flatten it")
            raise _LimitExceeded
        if event.tag is not None:
            self._refuse_tag(event)
        top = self.open[-1] if self.open else None
        is_key = top is not None and type(top.data) is dict and not top.in_value
        if is_key:
            message = "a list or mapping cannot be a key: write text, in quotes if it has brackets"
            self._problem(event.start_mark, message)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        location = self._location(event.start_mark)
        location.parts = {}
        self.open.append(
            _OpenCollection(data, location, event.anchor, self.count - 1, is_key=is_key)
        )

    def _end(self, documents: list[Document]) -> None:
        done = self.open.pop()
        if done.merged is not None:
            _merge(done)
        if done.anchor is not None:
            self.anchors[done.anchor] = _Anchor(done.data, done.location, self.count - done.before)
        if done.is_key:
            self.open[-1].in_value, self.open[-1].key = True, "?"
        elif self.open:
            self._add(self.open[-1], done.data, done.location)
        elif len(self.problems) == self.faults:
            documents.append(Document(done.data, Positions(self.file, done.location)))

    def _alias(self, event: Any) -> None:
        name, mark = event.anchor, event.start_mark
        anchored = self.anchors.get(name)
        if anchored is None:
            loop = name in self.anchors
            self._problem(
                mark,
                f"*{name} is inside &{name} and would never end: remove it"
                if loop
                else f'no anchor &{name} before this alias: write "*{name}" if it is text',
            )
            anchored = _Anchor(None, self._location(mark), 1)
        self.count += anchored.size - 1
        self._count(event)
        top = self.open[-1] if self.open else None
        if top is None:
            return
        if type(top.data) is dict and not top.in_value:
            self._problem(mark, "an alias as a key: write the key's text")
            top.in_value, top.key = True, "?"
            return
        self._add(top, anchored.data, anchored.location)

    def _add(self, top: _OpenCollection, value: Any, location: Location) -> None:
        parts = top.location.parts
        assert parts is not None
        if type(top.data) is list:
            parts[len(top.data)] = (location.line, location.column, location)
            top.data.append(value)
            return
        top.in_value = False
        if top.key is None:
            self._set_merge(top, value, location)
            return
        top.data[top.key] = value
        parts[top.key] = (*top.key_location, location)

    def _set_merge(self, top: _OpenCollection, value: Any, location: Location) -> None:
        sources = value if isinstance(value, list) else [value]
        if all(isinstance(source, dict) for source in sources):
            top.merged = (value, location)
            return
        origin = Origin(self.file, location.line, location.column)
        message = "<< takes a mapping or a list of mappings, as in <<: *defaults"
        self._add_problem(Problem(origin, message))

    def _count(self, event: Any) -> None:
        self.count += 1
        if self.count > MAX_NODES:
            message = (
                f"more than {MAX_NODES} keys, values and documents, with what aliases and "
                "merges bring in: split the file, or write less with aliases"
            )
            self._problem(event.start_mark, message)
            raise _LimitExceeded

    def _refuse_tag(self, event: Any) -> None:
        shown = event.tag.replace("tag:yaml.org,2002:", "!!")
        message = (
            f"the tag {shown} is not supported, since files hold plain data only: remove the tag"
        )
        self._problem(event.start_mark, message)

    def _location(self, mark: Any) -> Location:
        return Location(mark.line + 1 + self.line_offset, mark.column + 1)

    def _problem(self, mark: Any, message: str) -> None:
        line, column = (mark.line, mark.column) if mark is not None else (0, 0)
        self._add_problem(
            Problem(Origin(self.file, line + 1 + self.line_offset, column + 1), message)
        )

    def _add_problem(self, problem: Problem) -> None:
        if len(self.problems) == MAX_PROBLEMS:
            self.problems.append(attrs.evolve(problem, message="further problems are not shown"))
            raise _LimitExceeded
        self.problems.append(problem)


def _merge(done: _OpenCollection) -> None:
    assert done.merged is not None
    assert done.location.parts is not None
    value, location = done.merged
    for source, parts in _merge_sources(value, location):
        for key, item in source.items():
            if key not in done.data:
                done.data[key] = item
                done.location.parts[key] = parts[key]


def _merge_sources(
    value: Any, location: Location
) -> Iterator[tuple[dict[str, Any], dict[str | int, tuple[int, int, Location]]]]:
    if isinstance(value, dict):
        yield value, location.parts or {}
        return
    for index, source in enumerate(value):
        assert location.parts is not None
        yield source, location.parts[index][2].parts or {}
