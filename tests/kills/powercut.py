"""What a power cut may leave of a directory, built from a record of writes and syncs.

strace makes the record, of a daemon and all its programs. After a cut:

1. A file has the content of its last sync, and any subset of the later writes.
2. A directory has the names of its last sync, and a prefix of the later changes:
   a file system that journals its names keeps their order in one directory.
3. Everything below a lost name is lost as well.
"""

# Paths are those of the record, which need not exist here.
# ruff: noqa: PTH118

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import attrs

CALLS = (
    "openat,creat,write,pwrite64,writev,ftruncate,fsync,fdatasync,"
    "rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir"
)
_LINE = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+)(?:<(.*)>)?")
_UNFINISHED = re.compile(r"^(\d+) +(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. \w+ resumed>(.*)$")
_ARGUMENT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"|(AT_FDCWD|-?\d+)(?:<([^>]*)>)?|([A-Z_|0-9a-z]+)')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")


def wrapper(record: Path) -> list[str]:
    """The command line that precedes the command to record."""
    return [
        "strace", "-f", "--seccomp-bpf", "-qqq", "-y", "-xx", "-s", "4000000",
        "-e", "signal=none", "-e", f"trace={CALLS}", "-o", str(record),
    ]  # fmt: skip


def may_trace() -> bool:
    """Whether strace exists and may trace."""
    strace = shutil.which("strace")
    if strace is None:
        return False
    trial = [strace, "-o", "/dev/null", "true"]
    return subprocess.run(trial, check=False, capture_output=True).returncode == 0


@attrs.frozen
class Change:
    """One recorded call: its kind, path and arguments."""

    kind: str  # write, truncate, sync, make, mkdir, rename, unlink
    path: str
    other: str = ""
    data: bytes = b""
    offset: int = 0


def read_record(record: Path, root: Path) -> list[Change]:
    """The changes below *root*, in their order."""
    reading = _Reading(f"{root}/")
    for line in record.read_text(errors="replace").splitlines():
        reading.take(line)
    return reading.changes


@attrs.define(eq=False)
class _Reading:
    """The state of the parser: unfinished calls, file positions and sizes."""

    root: str
    changes: list[Change] = attrs.field(factory=list)
    begun: dict[str, str] = attrs.field(factory=dict)
    positions: dict[str, int] = attrs.field(factory=dict)
    sizes: dict[str, int] = attrs.field(factory=dict)
    appending: set[str] = attrs.field(factory=set)

    def take(self, line: str) -> None:
        if found := _UNFINISHED.match(line):
            self.begun[found[1]] = line.removesuffix(" <unfinished ...>")
            return
        if found := _RESUMED.match(line):
            line = self.begun.pop(found[1], "") + found[2]
        found = _LINE.match(line)
        if found is None or int(found[4]) < 0:
            return
        arguments = [
            _bytes(text)
            if text or not (number or word)
            else _path(where)
            if where
            else number or word
            for text, number, where, word in _ARGUMENT.findall(found[3])
        ]
        self.call(found[2], arguments, found[3], _path(found[5] or ""))

    def call(self, name: str, arguments: list[Any], text: str, opened: str) -> None:
        if name in ("openat", "creat"):
            self.opened(opened, text)
        elif name in ("write", "pwrite64"):
            self.written(name, arguments)
        elif name == "ftruncate":
            self.add(Change("truncate", arguments[0], offset=int(arguments[1])))
        elif name in ("fsync", "fdatasync"):
            self.add(Change("sync", arguments[0]))
        elif name.startswith("rename"):
            old, new = self.two(name, arguments)
            self.add(Change("rename", old, new))
        elif name.startswith(("unlink", "rmdir")):
            self.add(Change("unlink", self.one(name, arguments)))
        elif name.startswith("mkdir"):
            self.add(Change("mkdir", self.one(name, arguments)))

    def one(self, name: str, arguments: list[Any]) -> str:
        if name.endswith("at"):
            return os.path.join(arguments[0], arguments[1].decode())
        return str(arguments[0].decode())

    def two(self, name: str, arguments: list[Any]) -> tuple[str, str]:
        if name == "rename":
            return arguments[0].decode(), arguments[1].decode()
        return (
            os.path.join(arguments[0], arguments[1].decode()),
            os.path.join(arguments[2], arguments[3].decode()),
        )

    def opened(self, path: str, flags: str) -> None:
        self.positions[path] = 0
        (self.appending.add if "O_APPEND" in flags else self.appending.discard)(path)
        if "O_CREAT" in flags:
            self.add(Change("make", path))
        if "O_TRUNC" in flags:
            self.add(Change("truncate", path, offset=0))

    def written(self, name: str, arguments: list[Any]) -> None:
        path, data = arguments[0], arguments[1]
        if name == "pwrite64":
            self.add(Change("write", path, data=data, offset=int(arguments[3])))
            return
        at = self.sizes.get(path, 0) if path in self.appending else self.positions.get(path, 0)
        self.positions[path] = at + len(data)
        self.add(Change("write", path, data=data, offset=at))

    def add(self, change: Change) -> None:
        if not change.path.startswith(self.root) and f"{change.path}/" != self.root:
            return
        if change.kind == "write":
            end = change.offset + len(change.data)
            self.sizes[change.path] = max(self.sizes.get(change.path, 0), end)
        elif change.kind == "truncate":
            self.sizes[change.path] = change.offset
        elif change.kind == "rename":
            self.sizes[change.other] = self.sizes.pop(change.path, 0)
            self.positions[change.other] = self.positions.pop(change.path, 0)
        self.changes.append(change)


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _path(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


@attrs.define(eq=False)
class _File:
    """An inode: the durable content, and the changes since."""

    content: bytes = b""
    later: list[Change] = attrs.field(factory=list)

    def cut(self, draw: random.Random, share: float) -> bytes:
        content = bytearray(self.content)
        for change in self.later:
            if draw.random() < share:
                apply(content, change)
        return bytes(content)


@attrs.define(eq=False)
class _Directory:
    """An inode: the durable names, and the changes since: each a name and its new node."""

    names: dict[str, _File | _Directory] = attrs.field(factory=dict)
    later: list[tuple[str, _File | _Directory | None]] = attrs.field(factory=list)

    def now(self) -> dict[str, _File | _Directory]:
        return self.after(len(self.later))

    def after(self, count: int) -> dict[str, _File | _Directory]:
        names = dict(self.names)
        for name, node in self.later[:count]:
            if node is None:
                names.pop(name, None)
            else:
                # A rename is one change: the file has either the old or the new name.
                for old in [old for old, other in names.items() if other is node]:
                    del names[old]
                names[name] = node
        return names


def apply(content: bytearray, change: Change) -> None:
    """Apply *change* to *content*."""
    if change.kind == "truncate":
        del content[change.offset :]
        content.extend(bytes(change.offset - len(content)))
    else:
        content.extend(bytes(max(0, change.offset - len(content))))
        content[change.offset : change.offset + len(change.data)] = change.data


class Disk:
    """The contents of the disk and of the caches above it, while the record is replayed."""

    def __init__(self, root: Path, before: Path) -> None:
        """*root* is the directory in the record, *before* a copy from when the record began."""
        self.root = root
        self.top = self._load(before)

    def _load(self, directory: Path) -> _Directory:
        made = _Directory()
        for entry in directory.iterdir():
            if entry.is_dir():
                made.names[entry.name] = self._load(entry)
            elif entry.is_file():
                made.names[entry.name] = _File(entry.read_bytes())
        return made

    def find(self, path: str) -> _File | _Directory | None:
        """The node at *path* now."""
        node: _File | _Directory | None = self.top
        for part in Path(path).relative_to(self.root).parts:
            node = node.now().get(part) if isinstance(node, _Directory) else None
        return node

    def take(self, change: Change) -> None:
        """Replay one more change."""
        node = self.find(change.path)
        if change.kind == "sync":
            self._sync(node)
        elif change.kind in ("write", "truncate"):
            if isinstance(node, _File):
                node.later.append(change)
        elif change.kind == "rename":
            above = self.find(str(Path(change.other).parent))
            if isinstance(above, _Directory) and node is not None:
                above.later.append((Path(change.other).name, node))
        else:
            above = self.find(str(Path(change.path).parent))
            if isinstance(above, _Directory):
                self._name(above, Path(change.path).name, change.kind, node)

    def _sync(self, node: _File | _Directory | None) -> None:
        if isinstance(node, _Directory):
            node.names, node.later = node.now(), []
        elif node is not None:
            content = bytearray(node.content)
            for change in node.later:
                apply(content, change)
            node.content, node.later = bytes(content), []

    def _name(
        self, above: _Directory, name: str, kind: str, node: _File | _Directory | None
    ) -> None:
        if kind == "unlink":
            above.later.append((name, None))
        elif node is None:
            above.later.append((name, _Directory() if kind == "mkdir" else _File()))

    def cut(self, draw: random.Random, share: float, target: Path) -> None:
        """Write to *target* what a cut now may leave, with a *share* of the non-durable changes."""
        self._write(self.top, draw, share, target)

    def _write(self, node: _Directory, draw: random.Random, share: float, target: Path) -> None:
        target.mkdir(mode=0o755, exist_ok=True)
        kept = sum(draw.random() < share for _ in node.later)
        for name, inner in node.after(kept).items():
            if isinstance(inner, _Directory):
                self._write(inner, draw, share, target / name)
            else:
                (target / name).write_bytes(inner.cut(draw, share))
                (target / name).chmod(0o644)
