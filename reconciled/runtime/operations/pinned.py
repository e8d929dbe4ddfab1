"""Pinned inputs: the manifest as it was when an operation began, kept in its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reconciled.core.resources import Manifest, Origin
from reconciled.journal.operation_record import OperationRecord


def pin(manifest: Manifest, *, removal: bool) -> dict[str, Any]:
    """*manifest* as plain data; removal: the operation removes what was applied."""
    return {
        "kind": manifest.kind,
        "name": manifest.name,
        "namespace": manifest.namespace,
        "spec": dict(manifest.spec),
        "fingerprint": manifest.fingerprint,
        "labels": dict(manifest.labels),
        "annotations": dict(manifest.annotations),
        "file": manifest.origin.file,
        "base": str(Path(manifest.origin.file).parent),
        "removal": removal,
    }


def pinned_manifest(record: OperationRecord) -> Manifest:
    """The manifest as it was when *record* began."""
    pinned = record.pinned
    return Manifest(
        pinned["kind"],
        pinned["name"],
        pinned["spec"],
        Origin(pinned["file"]),
        pinned["fingerprint"],
        namespace=pinned["namespace"],
        labels=pinned["labels"],
        annotations=pinned["annotations"],
    )


def is_removal(record: OperationRecord) -> bool:
    """Whether *record* removes what was applied."""
    return bool(record.pinned.get("removal"))
