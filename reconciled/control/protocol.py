"""What is said over the control socket: one line of JSON in, lines of JSON out.

    → {"verb": "stop", "now": true}
    ← {"accepted": "stop", "pid": 4711}         at once; from here on the daemon acts
    ← {"code": 0, "lines": ["…"]}               when it is done: the exit code of the verb

In place of either answer: ``{"refused": "why"}``. Sizes are bounded on both sides.

1. The acknowledgement comes before the effect, and a request whose sender does not get it is
   dropped: a kept socket holds requests for a daemon that is dead, and the next one must not
   act on what somebody wanted of it who has given up meanwhile.
2. Nobody is asked for what a later version says: what is unknown in an answer is passed over,
   what is unknown in a request is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from reconciled.core.errors import MalformedMessage

# Of one line, in bytes.
LONGEST_REQUEST = 4096
LONGEST_REPLY = 1 << 20
# What the kernel takes as the address of a unix socket.
_LONGEST_ADDRESS = 107


@attrs.frozen
class ControlRequest:
    """What is asked for."""

    verb: str
    arguments: Mapping[str, Any] = attrs.Factory(dict)


@attrs.frozen
class ControlReply:
    """The end of a verb: its exit code, and what it prints, on standard error where it failed."""

    code: int
    lines: tuple[str, ...] = ()


def encode(message: Mapping[str, Any]) -> bytes:
    """*message* as a line."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def encode_request(request: ControlRequest) -> bytes:
    """*request* as a line."""
    return encode({"verb": request.verb, **request.arguments})


def decode_request(line: bytes) -> ControlRequest:
    """The request in *line*. Raises Malformed."""
    message = decode(line)
    verb = message.pop("verb", None)
    if not isinstance(verb, str):
        raise MalformedMessage('a request names its verb, as in {"verb": "reload"}')
    return ControlRequest(verb, message)


def encode_reply(answer: ControlReply) -> bytes:
    """*answer* as a line; of an answer that is too long the end is left out, and that is said."""
    lines: list[str] = []
    size = 0
    for each in answer.lines:
        size += len(json.dumps(each)) + 2
        if size > LONGEST_REPLY // 2:
            lines.append(f"… and {len(answer.lines) - len(lines)} more: the log has them")
            break
        lines.append(each)
    return encode({"code": answer.code, "lines": lines})


def decode(line: bytes) -> dict[str, Any]:
    """The mapping in *line*. Raises Malformed."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"no line of JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessage("no mapping")
    return message


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """*path* as an address of a unix socket, however long it is. Raises OSError.

    A state directory may lie deep. Rejected: to change the working directory, which threads share.
    """
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
