"""Runs in the guest: connects to addresses again and again, and reports the results.

Arguments: ``unix:PATH`` or ``tcp:PORT``. It opens one connection per address every 10 ms without
waiting for earlier answers: while nothing accepts, they queue. At the end of standard input it
waits for the open ones, and prints a JSON mapping: address → connected, answered, refused (errors).
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sys
import time
from typing import Any

PACE = 0.01
LAST_ANSWERS = 3.0
# An unknown verb is answered and has no effect.
WORDS = {"unix": b'{"verb": "connect"}\n', "tcp": b"GET /livez HTTP/1.0\r\n\r\n"}


def connect(address: str) -> socket.socket:
    """A new connection to *address* with its request sent. Raises OSError."""
    kind, _, name = address.partition(":")
    client = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    try:
        client.settimeout(0 if kind == "unix" else 1)
        client.connect(name if kind == "unix" else ("127.0.0.1", int(name)))
        client.sendall(WORDS[kind])
    except BaseException:
        client.close()
        raise
    return client


def main(addresses: list[str]) -> dict[str, dict[str, Any]]:
    """Connect until standard input ends; what happened to the connections of each address."""
    found = {each: {"connected": 0, "answered": 0, "refused": []} for each in addresses}
    with selectors.DefaultSelector() as waiting:
        waiting.register(sys.stdin, selectors.EVENT_READ)
        ending, until = False, time.monotonic() + 60
        while time.monotonic() < until:
            if not ending:
                for each in addresses:
                    try:
                        waiting.register(connect(each), selectors.EVENT_READ, each)
                        found[each]["connected"] += 1
                    except OSError as error:
                        found[each]["refused"].append(str(error))
            elif len(waiting.get_map()) == 0:
                break
            next_at = time.monotonic() + PACE
            while (left := next_at - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    waiting.unregister(key.fileobj)
                    if key.data is None:
                        ending, until = True, time.monotonic() + LAST_ANSWERS
                        continue
                    with contextlib.suppress(OSError):
                        found[key.data]["answered"] += bool(key.fileobj.recv(4096))
                    key.fileobj.close()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
