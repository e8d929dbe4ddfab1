"""What every Request says of the manifest that it is for, be it a run or a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reconciled.core.resources import Fingerprint, Manifest


class ManifestRequest:
    """The manifest's part of a Request. Without state: who inherits it has the manifest."""

    __slots__ = ()

    manifest: Manifest

    @property
    def name(self) -> str:
        """Of the manifest."""
        return self.manifest.name

    @property
    def namespace(self) -> str | None:
        """Of the manifest."""
        return self.manifest.namespace

    @property
    def labels(self) -> dict[str, str]:
        """Of the manifest."""
        return dict(self.manifest.labels)

    @property
    def annotations(self) -> dict[str, str]:
        """Of the manifest."""
        return dict(self.manifest.annotations)

    @property
    def raw_spec(self) -> dict[str, Any]:
        """The spec as it was declared."""
        return dict(self.manifest.spec)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the spec."""
        return self.manifest.fingerprint

    @property
    def base(self) -> Path:
        """Where relative paths of the spec start."""
        return Path(self.manifest.origin.file).parent
