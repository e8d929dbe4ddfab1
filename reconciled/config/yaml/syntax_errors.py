"""Syntax errors of YAML in words that say what to do; the parser's own words where we have none."""

from __future__ import annotations

from typing import Any

import yaml

_HINTS = {
    "mapping values are not allowed in this context": (
        "a second ':' in one line: put the value into quotes, or begin a new line"
    ),
    "could not find expected ':'": "no ':' after the key in this line: add it, or close the quotes",
    "did not find expected key": (
        "no key of the mapping begins here: mind the indentation and what is unclosed above"
    ),
    "did not find expected '-' indicator": "no '-' of the list begins here: mind the indentation",
    "did not find expected ',' or ']'": "a list in [ ] goes on here: add ',' or close it with ']'",
    "did not find expected ',' or '}'": (
        "a mapping in { } goes on here: add ',' or close it with '}'"
    ),
    "found unexpected end of stream": "the file ends inside quotes: close them",
    "found unexpected document indicator": "the document ends inside quotes: close them",
    "exceeded maximum nesting depth": "nested too deeply: flatten it",
    "did not find expected <document start>": (
        "something follows the end of the document: mind the indentation, or begin with '---'"
    ),
}


def syntax_fault(exc: yaml.MarkedYAMLError, text: str, index: int, lines: int) -> tuple[Any, str]:
    """Where *exc*, raised at *index* of *text*, has to be mended, and how.

    *lines* is the number of lines that were read before *text*.
    """
    place = exc.problem_mark or exc.context_mark
    said = exc.problem or exc.context or "not YAML"
    if said == "found character that cannot start any token":
        character = text[index : index + 1]
        if character == "\t":
            return place, "a tab cannot indent: use spaces"
        return place, f"{character} cannot begin a word: put the word into quotes"
    message = _HINTS.get(said, said)
    opened = exc.context_mark
    unclosed = "flow" in (exc.context or "") or "quoted" in (exc.context or "")
    if not unclosed or opened is None:
        return place, message
    if index >= len(text.rstrip()):
        # Noticed only where the file ends, which is no place to mend anything.
        return opened, message
    return place, f"{message} (opened in line {opened.line + 1 + lines})"
