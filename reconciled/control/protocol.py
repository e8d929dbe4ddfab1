"""The protocol of the control socket: one line of JSON as request, lines of JSON as reply.

    → {"verb": "stop", "now": true}
    ← {"accepted": "stop", "pid": 4711}         at once; from here on the daemon acts
    ← {"code": 0, "lines": ["…"]}               when it is done: the exit code of the verb

In place of either reply: ``{"refused": "why"}``. Sizes are bounded on both sides.

1. The acknowledgement precedes the effect, and a request whose sender does not receive it is
   dropped: a kept socket holds requests for a daemon that has ended, and the next daemon must not
   act on a request whose sender has given up meanwhile.
2. Versions may differ: unknown keys of a reply are ignored, unknown arguments of a request are
   refused.
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

# Bytes of one line.
LONGEST_REQUEST = 4096
LONGEST_REPLY = 1 << 20
# The longest address of a unix socket that the kernel accepts.
_LONGEST_ADDRESS = 107


@attrs.frozen
class ControlRequest:
    """A verb and its arguments."""

    verb: str
    arguments: Mapping[str, Any] = attrs.Factory(dict)


@attrs.frozen
class ControlReply:
    """The result of a verb: its exit code, and its output, for standard error where it failed."""

    code: int
    lines: tuple[str, ...] = ()


def encode(message: Mapping[str, Any]) -> bytes:
    """*message* as a line."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def encode_request(request: ControlRequest) -> bytes:
    """*request* as a line."""
    return encode({"verb": request.verb, **request.arguments})


def decode_request(line: bytes) -> ControlRequest:
    """The request in *line*. Raises MalformedMessage."""
    message = decode(line)
    verb = message.pop("verb", None)
    if not isinstance(verb, str):
        raise MalformedMessage('the request has no verb: write for example {"verb": "reload"}')
    return ControlRequest(verb, message)


def encode_reply(reply: ControlReply) -> bytes:
    """*reply* as a line; of a reply that is too long the end is replaced with a count."""
    lines: list[str] = []
    size = 0
    for each in reply.lines:
        size += len(json.dumps(each)) + 2
        if size > LONGEST_REPLY // 2:
            lines.append(f"… and {len(reply.lines) - len(lines)} more: the log has them")
            break
        lines.append(each)
    return encode({"code": reply.code, "lines": lines})


def decode(line: bytes) -> dict[str, Any]:
    """The mapping in *line*. Raises MalformedMessage."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"invalid JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessage("the JSON is not a mapping")
    return message


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """*path* as an address of a unix socket, however long its directory. Raises OSError.

    Rejected for a long path: a change of the working directory, which threads share.
    """
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
