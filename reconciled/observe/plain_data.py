"""Converts any logged value into plain, bounded data without secrets.

1. Never raises: not for a broken __repr__, a reference cycle, or a number that JSON lacks.
2. The result is valid JSON data, bounded in length, depth and number of items; a cut is marked.
3. The result contains no secret (see redaction).
"""

from __future__ import annotations

import enum
import math
import traceback
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import PurePath
from typing import Any

from reconciled.observe.redaction import REDACTED, Redactor, is_secret_name

LONGEST = 4096  # characters of a text
LONGEST_TRACEBACK = 32768
_MAX_DEPTH = 4
_MAX_ITEMS = 64  # items of a collection
_MAX_LEAVES = 5  # members of an exception group that are shown
_INTEGER_LIMIT = 1 << 63  # beyond it readers of JSON lose digits


def plain_data(value: Any, redactor: Redactor, depth: int = 0) -> Any:
    """*value* as plain data: None, bool, int, float, str, list or dict."""
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is str:
        return redacted_text(value, redactor)
    if kind is int and -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        return value
    if kind is float:
        return value if math.isfinite(value) else repr(value)
    try:
        return _plain_other(value, redactor, depth)
    except Exception as exc:  # noqa: BLE001 - a log call must not fail for its arguments
        return f"<unprintable {kind.__name__}: {type(exc).__name__}>"


def redacted_text(value: str, redactor: Redactor, longest: int = LONGEST) -> str:
    """*value* without secrets, cut in the middle if it is longer than *longest* characters."""
    text = redactor.redact(value)
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} …[{len(text) - 2 * half} characters cut]… {text[-half:]}"


def message_of(error: BaseException) -> str:
    """The message of *error*; of a group, type and message of each member that is not a group."""
    if isinstance(error, BaseExceptionGroup):
        leaves = list(_leaves(error))
        shown = "; ".join(
            f"{type(leaf).__name__}: {message_of(leaf)}" for leaf in leaves[:_MAX_LEAVES]
        )
        more = len(leaves) - _MAX_LEAVES
        return f"{shown}; and {more} more" if more > 0 else shown
    try:
        return str(error)
    except Exception as exc:  # noqa: BLE001 - a log call must not fail for its arguments
        return f"<unprintable {type(error).__name__}: {type(exc).__name__}>"


def traceback_of(error: BaseException, redactor: Redactor) -> str:
    """The traceback of *error* and of its causes, with newlines."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as exc:  # noqa: BLE001 - a log call must not fail for its arguments
        text = f"<no traceback of {type(error).__name__}: {type(exc).__name__}>"
    return redacted_text(text, redactor, LONGEST_TRACEBACK)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    waiting: list[BaseException] = [group]
    leaves = []
    while waiting:
        error = waiting.pop()
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(reversed(error.exceptions))
        else:
            leaves.append(error)
    return leaves


def _plain_other(value: Any, redactor: Redactor, depth: int) -> Any:
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return _mapping(value, redactor, depth + 1)
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple, AbstractSet)):
        items = [plain_data(item, redactor, depth + 1) for item in islice(value, _MAX_ITEMS)]
        more = len(value) - len(items)
        return [*items, f"…[{more} more]"] if more > 0 else items
    return redacted_text(_text(value), redactor)


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value[: 4 * LONGEST]).decode("utf-8", "backslashreplace")
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {message_of(value)}"
    return repr(value)


def _mapping(value: Mapping[Any, Any], redactor: Redactor, depth: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, item in value.items():
        if len(result) == _MAX_ITEMS:
            result["…"] = f"[{len(value) - _MAX_ITEMS} more]"
            break
        shown = redacted_text(name if type(name) is str else repr(name), redactor)
        result[shown] = REDACTED if is_secret_name(shown) else plain_data(item, redactor, depth)
    return result
