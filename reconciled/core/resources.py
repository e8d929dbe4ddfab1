"""Declared resources: keys, manifests, and where they are written.

A *key* is ``controller/name`` or ``controller/namespace/name``. The queue and the log hold keys,
never events and never manifests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NewType

import attrs

Key = NewType("Key", str)
Fingerprint = NewType("Fingerprint", str)

NOTHING: Mapping[str, str] = MappingProxyType({})


def key_of(controller: str, name: str, namespace: str | None = None) -> Key:
    """The key of the resource *name* of *controller*."""
    if namespace is None:
        return Key(f"{controller}/{name}")
    return Key(f"{controller}/{namespace}/{name}")


def controller_of(key: Key) -> str:
    """The controller's name in *key*."""
    return key.partition("/")[0]


def directory_of(key: Key) -> str:
    """The relative path of the directory for the files of *key*, below that of its controller.

    ``a/b`` and ``a/b/c`` are both keys. "~" occurs in no name, so neither contains the other.
    """
    controller, _, rest = key.partition("/")
    return f"{controller}/{rest.replace('/', '~')}"


def fingerprint_of(value: object) -> Fingerprint:
    """A content hash: equal for equal plain data, whatever the order of its mappings.

    Raises TypeError for data that JSON cannot express. Fingerprints are stored, so the result
    must never change between versions (invariant 15).
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return Fingerprint(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32])


@attrs.frozen
class Origin:
    """A location in a file, for messages. Lines and columns count from 1."""

    file: str
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@attrs.frozen
class Manifest:
    """One declared resource, as plain data.

    typed_spec is the spec as an object of the plugin's class, for a manifest that was parsed for
    a controller of its kind; else None. It is derived from *spec* alone, so it takes no part in
    equality, repr or fingerprint, and is never stored. attrs.evolve() drops it: a manifest with
    another spec must not carry the object of the old one.
    """

    kind: str
    name: str
    spec: Mapping[str, Any]
    origin: Origin
    # Of kind and spec only: a changed label or a moved file needs no run.
    fingerprint: Fingerprint
    namespace: str | None = None
    labels: Mapping[str, str] = NOTHING
    annotations: Mapping[str, str] = NOTHING
    typed_spec: Any = attrs.field(default=None, init=False, eq=False, repr=False)

    def with_typed_spec(self, typed_spec: Any) -> Manifest:
        """The same manifest, carrying *typed_spec*."""
        manifest = attrs.evolve(self)
        object.__setattr__(manifest, "typed_spec", typed_spec)
        return manifest

    def key_for(self, controller: str) -> Key:
        """The key of this resource under *controller*."""
        return key_of(controller, self.name, self.namespace)
