"""The numbers of events, and what the message catalog says about each."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from reconciled.cli.main import VERBS
from reconciled.observe.message_ids import MESSAGE_IDS

ROOT = Path(__file__).resolve().parents[2]
CATALOG = (ROOT / "systemd/reconciled.catalog").read_text()
ENTRY = re.compile(r"^# (\S+)\n-- (\w+)\n(.*?)\n\n(.*?)(?=^# |\Z)", re.MULTILINE | re.DOTALL)


def test_numbers_are_ids_and_stand_for_one_event_each() -> None:
    """A number is a 128-bit id in the journal's spelling, and no other event has it."""
    assert [each for each in MESSAGE_IDS.values() if not re.fullmatch("[0-9a-f]{32}", each)] == []
    assert [each for each, count in Counter(MESSAGE_IDS.values()).items() if count > 1] == []


def test_the_catalog_has_what_the_code_has() -> None:
    """Every numbered event has its entry, under its own name, and no entry is of another one."""
    entries = [(event, number) for event, number, _, _ in ENTRY.findall(CATALOG)]
    assert dict(entries) == dict(MESSAGE_IDS)
    assert len(entries) == len(MESSAGE_IDS)
    assert len(re.findall("^-- ", CATALOG, re.MULTILINE)) == len(MESSAGE_IDS)


def test_numbered_events_are_documented() -> None:
    """A number belongs to an event that docs/logs.md explains."""
    documented = re.findall(
        r"^\| `([a-z]+\.[a-z_]+)` \|", (ROOT / "docs/logs.md").read_text(), re.MULTILINE
    )
    assert set(MESSAGE_IDS) - set(documented) == set()


def test_entries_are_short_and_say_whose_they_are() -> None:
    """An entry has a subject and an owner, and fits on a terminal below its line."""
    for event, _, head, body in ENTRY.findall(CATALOG):
        assert re.fullmatch(r"Subject: .+\nDefined-By: reconciled\nSupport: https://\S+", head), (
            event
        )
        assert len(body.strip().splitlines()) <= 14, event
        # A field may be as long as what it stands for; the rest of the line is ours.
        told = re.sub(r"@RECONCILED_\w+@", "x" * 20, body)
        assert [line for line in told.splitlines() if len(line) > 92] == [], event
        # journalctl shows the name of a field whose value is longer than 256 characters.
        assert "@RECONCILED_REASON@" not in body, event


def test_commands_in_the_catalog_exist() -> None:
    """A verb that the catalog advises is one that can be typed."""
    told = set(re.findall(r"^  reconciled (\w+)", CATALOG, re.MULTILINE))
    assert len(told) > 5
    assert told - set(VERBS) == set()


def test_the_manager_takes_the_catalog(tmp_path: Path) -> None:
    """What compiles catalogs reads ours without a complaint, and gives each entry back."""
    journalctl = shutil.which("journalctl")
    if journalctl is None:
        pytest.skip("journalctl is missing (package systemd)")
    place = tmp_path / "usr/lib/systemd/catalog"
    place.mkdir(parents=True)
    (place / "reconciled.catalog").write_text(CATALOG)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    command = [journalctl, f"--root={tmp_path}"]
    subprocess.run([*command, "--update-catalog"], check=True, capture_output=True)
    listed = subprocess.run(
        [*command, "--list-catalog"], check=True, capture_output=True, text=True
    ).stdout
    assert {line.split()[0] for line in listed.splitlines()} == set(MESSAGE_IDS.values())
