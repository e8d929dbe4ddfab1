"""The MESSAGE_IDs of events, and the entries of the message catalog."""

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


def test_message_ids_are_valid_and_unique() -> None:
    """A MESSAGE_ID is a 128-bit id in the journal's spelling, and belongs to one event."""
    assert [each for each in MESSAGE_IDS.values() if not re.fullmatch("[0-9a-f]{32}", each)] == []
    assert [each for each, count in Counter(MESSAGE_IDS.values()).items() if count > 1] == []


def test_the_catalog_and_the_code_have_the_same_events() -> None:
    """Every event with a MESSAGE_ID has an entry, under its own name, and there is no other."""
    entries = [(event, number) for event, number, _, _ in ENTRY.findall(CATALOG)]
    assert dict(entries) == dict(MESSAGE_IDS)
    assert len(entries) == len(MESSAGE_IDS)
    assert len(re.findall("^-- ", CATALOG, re.MULTILINE)) == len(MESSAGE_IDS)


def test_events_with_a_message_id_are_documented() -> None:
    """Every event with a MESSAGE_ID is explained in docs/logs.md."""
    documented = re.findall(
        r"^\| `([a-z]+\.[a-z_]+)` \|", (ROOT / "docs/logs.md").read_text(), re.MULTILINE
    )
    assert set(MESSAGE_IDS) - set(documented) == set()


def test_entries_are_short_and_complete() -> None:
    """An entry has a subject, an owner and a support address, and fits on a terminal."""
    for event, _, head, body in ENTRY.findall(CATALOG):
        assert re.fullmatch(r"Subject: .+\nDefined-By: reconciled\nSupport: https://\S+", head), (
            event
        )
        assert len(body.strip().splitlines()) <= 14, event
        # A field may be as long as its value.
        expanded = re.sub(r"@RECONCILED_\w+@", "x" * 20, body)
        assert [line for line in expanded.splitlines() if len(line) > 92] == [], event
        # journalctl shows the name of a field whose value is longer than 256 characters.
        assert "@RECONCILED_REASON@" not in body, event


def test_commands_in_the_catalog_exist() -> None:
    """Every verb that the catalog names exists."""
    named = set(re.findall(r"^  reconciled (\w+)", CATALOG, re.MULTILINE))
    assert len(named) > 5
    assert named - set(VERBS) == set()


def test_journalctl_accepts_the_catalog(tmp_path: Path) -> None:
    """The catalog compiles without an error, and journalctl lists each entry."""
    journalctl = shutil.which("journalctl")
    if journalctl is None:
        pytest.skip("journalctl is missing (package systemd)")
    directory = tmp_path / "usr/lib/systemd/catalog"
    directory.mkdir(parents=True)
    (directory / "reconciled.catalog").write_text(CATALOG)
    (tmp_path / "var/lib/systemd/catalog").mkdir(parents=True)
    command = [journalctl, f"--root={tmp_path}"]
    subprocess.run([*command, "--update-catalog"], check=True, capture_output=True)
    listed = subprocess.run(
        [*command, "--list-catalog"], check=True, capture_output=True, text=True
    ).stdout
    assert {line.split()[0] for line in listed.splitlines()} == set(MESSAGE_IDS.values())
