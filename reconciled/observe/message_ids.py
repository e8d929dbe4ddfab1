"""The MESSAGE_ID of each event that has one in systemd's journal.

These are the events after which a person may have to act, and the landmarks of a history: ready,
the begin and the end of a stop. ``journalctl -x`` shows, below an entry, the text that
systemd/reconciled.catalog has for its id.

An id never changes and is never reused: alarms depend on it. Create a new one with
``systemd-id128 new``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MESSAGE_IDS: Mapping[str, str] = MappingProxyType(
    {
        "daemon.ready": "c2f3196de66a42208dcb298c0366f376",
        "daemon.refused": "3189b6e258714540bee5c0a5b19dac61",
        "daemon.locked": "151b5557211e45ceb2d3706797e348a8",
        "daemon.failed": "4b5c03f763de466ebd53cc12bf9efd6f",
        "daemon.crashed": "4828076056f44b908b857403b36b2de6",
        "state.lost": "08e6157eaf044b30a21203b83a1cf633",
        "state.copied": "eefb2cbeb0d845efb979590054fc147c",
        "config.invalid": "05b12c3cf296425899c928092c1a8bfb",
        "unit.timeout_too_short": "10ac4b1b69a341a7b6b2403287ae2466",
        "reload.failed": "ebb430080cb94be3bbe6521e2e5b0de2",
        "reload.refused": "a983dc2d62964b30bcee372950a61c88",
        "controller.stalled": "dd4f9f13d8e3488fbe470204eab2b6a6",
        "source.unavailable": "e785f05e30c54b9c8f11a427300d4516",
        "reconcile.terminal": "32e85e7ba80141e7a3dd709e789e0506",
        "reconcile.stuck": "9d7726935c1f47db91f318cccc0e64f2",
        "operation.interrupted": "faba6cd2a1d64f1987f4d94a443b63ad",
        "operation.left_open": "cc7b6e7620dd4a12a0a42ceaf51c6825",
        "operation.outcome_lost": "98ce6b1291014a1aa283c3fe0384f158",
        "operation.cut": "a2b5dcf60075427188dfa006e50d9480",
        "operation.found_open": "291eec38c8494c4e8f012ed8dc79ef4c",
        "operation.held": "65c1c8ec65f547eb9d63b40bc40e48d3",
        "program.still_running": "b552d0c2189b45b59cf9fe3fec2ec062",
        "program.overran": "2be52a3bf1a44b188311ba3be964e933",
        "program.stuck": "92a80de8eae64c0a93b1ae794f231461",
        "program.left_over": "3ea72627017b4f9ba0c3544036a3a5a1",
        "journal.unwritable": "b2c7397dd8924a27ad6712763ded9e6b",
        "journal.torn_tail": "582f0ab77c7c48508413e19d1118b685",
        "journal.damaged": "b03553b9ff1a41019928f838ac56afe2",
        "journal.degraded": "939bd155451b4d4c941c7b3d083bb560",
        "removals.held": "89d3e217a84e4b0890659bf7ab651b02",
        "plugin.failed": "78bbda41613649eca99b0023706e252b",
        "stop.began": "3d1f00f2598d4255987234e606aa98d7",
        "stop.left_behind": "cda16360e6394a65a10e62f5cb17883a",
        "loop.blocked": "125f54b23e894949999e9856f0900ecc",
        "stop.hung": "16c5729fa2984ba7832416ca1465546b",
        "stop.ended": "9aa1907969614862a1e732786c482f45",
        "shutdown.overran": "22aad39c7f9c4a209abc212355d34ce4",
        "log.dropped": "20b83702bfc4447894863f32f26ce791",
    }
)
