"""The part of a Request that comes from its manifest, shared by runs and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reconciled.core.resources import Fingerprint, Manifest


class ManifestRequest:
    """Members of a Request that come from ``manifest``, which the subclass defines."""

    __slots__ = ()

    manifest: Manifest

    @property
    def name(self) -> str:
        """``metadata.name`` of the manifest."""
        return self.manifest.name

    @property
    def namespace(self) -> str | None:
        """``metadata.namespace`` of the manifest; None if it has none."""
        return self.manifest.namespace

    @property
    def labels(self) -> dict[str, str]:
        """``metadata.labels`` of the manifest, a copy."""
        return dict(self.manifest.labels)

    @property
    def annotations(self) -> dict[str, str]:
        """``metadata.annotations`` of the manifest, a copy."""
        return dict(self.manifest.annotations)

    @property
    def raw_spec(self) -> dict[str, Any]:
        """The spec as plain data, as it was declared."""
        return dict(self.manifest.spec)

    @property
    def fingerprint(self) -> Fingerprint:
        """The content hash of kind and spec."""
        return self.manifest.fingerprint

    @property
    def base(self) -> Path:
        """The directory of the manifest's file, at which relative paths of the spec start."""
        return Path(self.manifest.origin.file).parent
