"""One complete read of a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconciled.core.errors import DeviceChanged
from reconciled.core.problems import Problem
from reconciled.core.resources import Manifest, Origin, fingerprint_of
from reconciled.watchers import listing as listing_module
from reconciled.watchers.listing import Listing, ReadFile, read_listing


def parse(data: bytes, file: str) -> tuple[list[Manifest], list[Problem]]:
    text = data.decode()
    return [Manifest("Exec", text, {}, Origin(file), fingerprint_of(text))], []


def names(listing: Listing) -> list[str]:
    return [manifest.name for file in listing.files.values() for manifest in file.manifests]


def test_a_fresh_file_is_not_known_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file written within the timestamp granularity is read again, whatever its status (C08)."""
    monkeypatch.setattr(listing_module, "_signature", lambda _status: (1, 2, 3, 4, 5))
    (tmp_path / "a.yaml").write_text("one")
    first = read_listing(tmp_path, {}, parse)
    (tmp_path / "a.yaml").write_text("two")
    assert names(read_listing(tmp_path, first.files, parse)) == ["two"]


def test_an_old_file_is_known_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with an older status is not opened again until the status changes."""
    monkeypatch.setattr(listing_module, "_TIMESTAMP_GRANULARITY_NS", -(10**12))
    (tmp_path / "a.yaml").write_text("one")
    first = read_listing(tmp_path, {}, parse)
    second = read_listing(tmp_path, first.files, parse)
    assert second.files["a.yaml"] is first.files["a.yaml"]
    (tmp_path / "a.yaml").write_text("three")
    assert names(read_listing(tmp_path, second.files, parse)) == ["three"]


def test_equal_bytes_are_not_parsed_again(tmp_path: Path) -> None:
    """A file that is read again with the same content keeps its manifests."""
    (tmp_path / "a.yaml").write_text("one")
    first = read_listing(tmp_path, {}, parse)
    second = read_listing(tmp_path, first.files, parse)
    assert second.files["a.yaml"].manifests is first.files["a.yaml"].manifests


def test_another_device_is_not_read(tmp_path: Path) -> None:
    """Nothing is read of a directory that is on another device than expected (C10 case 5)."""
    (tmp_path / "a.yaml").write_text("one")
    device = read_listing(tmp_path, {}, parse).device
    with pytest.raises(DeviceChanged, match=f"is on another device \\({device}\\) than before"):
        read_listing(tmp_path, {}, parse, device + 1)


def test_a_file_that_vanishes_during_the_listing_makes_it_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that vanished during the listing may have a new name that was not listed."""
    (tmp_path / "a.yaml").write_text("one")
    assert not read_listing(tmp_path, {}, parse).torn
    read = listing_module._Reader._read

    def gone(reader: object, name: str, *rest: object) -> ReadFile:
        (tmp_path / name).unlink()
        return read(reader, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(listing_module._Reader, "_read", gone)
    listing = read_listing(tmp_path, {}, parse)
    assert (listing.torn, listing.files) == (True, {})
