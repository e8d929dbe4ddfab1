"""Sends a request of a verb to the running daemon, and prints its reply."""

from __future__ import annotations

import argparse
import os
import sys

from reconciled.config.locations import find_config, find_socket
from reconciled.control.client import send_request
from reconciled.control.protocol import ControlRequest
from reconciled.core.errors import NoDaemon, RequestNotDone
from reconciled.core.exit_codes import FAILED, NO_DAEMON


def ask_daemon(arguments: argparse.Namespace, request: ControlRequest) -> int:
    """Send *request* and wait for its end; return the daemon's exit code.

    The socket is found even if the configuration is invalid: the daemon reports what is wrong
    with it.
    """
    verb = f"reconciled {request.verb}"
    path = find_socket(find_config(arguments.config, os.environ), os.environ)
    if path is None:
        sys.stderr.write(
            f"{verb}: cannot find the daemon's control socket: set control.socket in the "
            "configuration, or $RUNTIME_DIRECTORY or $STATE_DIRECTORY to the daemon's value\n"
        )
        return NO_DAEMON
    try:
        reply = send_request(path, request)
    except NoDaemon as error:
        sys.stderr.write(f"{verb}: {error}\n")
        return NO_DAEMON
    except RequestNotDone as error:
        sys.stderr.write(f"{verb}: {error}\n")
        return FAILED
    out = sys.stderr if reply.code else sys.stdout
    if out is not None:  # None: the caller closed it
        out.write("".join(f"{line}\n" for line in reply.lines))
    return reply.code
