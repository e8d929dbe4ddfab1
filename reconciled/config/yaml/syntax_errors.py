"""Messages for YAML syntax errors that say what to change; else the parser's own message."""

from __future__ import annotations

from typing import Any

import yaml

_HINTS = {
    "mapping values are not allowed in this context": (
        "a second ':' in one line: quote the value, or begin a new line"
    ),
    "could not find expected ':'": "no ':' after the key in this line: add it, or close the quotes",
    "did not find expected key": (
        "expected a key of the mapping: check the indentation, and quotes and brackets above"
    ),
    "did not find expected '-' indicator": "expected '-' of the list: check the indentation",
    "did not find expected ',' or ']'": "inside a list in [ ]: add ',' or close it with ']'",
    "did not find expected ',' or '}'": ("inside a mapping in { }: add ',' or close it with '}'"),
    "found unexpected end of stream": "the file ends inside quotes: close them",
    "found unexpected document indicator": "the document ends inside quotes: close them",
    "exceeded maximum nesting depth": "nested too deeply: flatten it",
    "did not find expected <document start>": (
        "content after the end of the document: check the indentation, or write '---' above it"
    ),
}


def syntax_fault(exc: yaml.MarkedYAMLError, text: str, index: int, lines: int) -> tuple[Any, str]:
    """The mark at which to fix *exc*, raised at *index* of *text*, and the message.

    *lines* is the number of lines before *text*.
    """
    mark = exc.problem_mark or exc.context_mark
    problem = exc.problem or exc.context or "not YAML"
    if problem == "found character that cannot start any token":
        character = text[index : index + 1]
        if character == "\t":
            return mark, "a tab cannot indent: use spaces"
        return mark, f"{character} cannot begin an unquoted value: quote it"
    message = _HINTS.get(problem, problem)
    opened = exc.context_mark
    unclosed = "flow" in (exc.context or "") or "quoted" in (exc.context or "")
    if not unclosed or opened is None:
        return mark, message
    if index >= len(text.rstrip()):
        # The parser notices it at the end of the file, where there is nothing to fix.
        return opened, message
    return mark, f"{message} (opened in line {opened.line + 1 + lines})"
