"""The running daemon as verbs reach it: they ask, print its answer, and end with its exit code."""

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
    """Have the daemon do *request*; the exit code.

    Its socket is found although the configuration may be invalid: the daemon itself has to tell
    what is wrong with it.
    """
    verb = f"reconciled {request.verb}"
    path = find_socket(find_config(arguments.config, os.environ), os.environ)
    if path is None:
        sys.stderr.write(
            f"{verb}: nothing says where the daemon's socket is: set control.socket in the "
            "configuration, or $RUNTIME_DIRECTORY or $STATE_DIRECTORY as the daemon has it\n"
        )
        return NO_DAEMON
    try:
        answer = send_request(path, request)
    except NoDaemon as error:
        sys.stderr.write(f"{verb}: {error}\n")
        return NO_DAEMON
    except RequestNotDone as error:
        sys.stderr.write(f"{verb}: {error}\n")
        return FAILED
    out = sys.stderr if answer.code else sys.stdout
    if out is not None:  # it was closed by whoever started us
        out.write("".join(f"{line}\n" for line in answer.lines))
    return answer.code
