"""The ``file`` reconciler: one file with content, mode and owner, and an action after a change.

1. A run that finds everything as desired only reads.
2. ``validate`` sees the complete new file before it takes its name; if it fails, the old stays.
3. ``after`` runs after every replacement, however many interruptions lie between the two.
4. Only content that this reconciler wrote is ever removed.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs

from reconciled.api import (
    Change,
    Comparison,
    FileRefused,
    Operation,
    ProgramFailed,
    Reconciler,
    Removed,
    Request,
    Result,
    compare_file,
    digest_of,
    done,
    read_file,
    remove_file,
    remove_temporary,
    replace_file,
    retry,
    run_program,
    temporary_name,
    terminal,
)
from reconciled.reconcilers.file.diff import describe_change, is_private
from reconciled.reconcilers.file.write_record import WriteRecord

# Seconds, of replacement, validate and after together; less where stop.critical is less.
BUDGET = 60.0
_MODE = re.compile(r"0?[0-7]{3,4}")


def _validate_mode(_spec: Any, _field: Any, mode: str | None) -> None:
    if mode is not None and not _MODE.fullmatch(mode):
        raise ValueError(f'mode {mode!r} is none: write it as quoted octal digits, as in "0644"')


def _validate_command(_spec: Any, field: attrs.Attribute[list[str]], argv: list[str]) -> None:
    if argv and not argv[0]:
        raise ValueError(f"{field.name} has an empty program: write it as [program, argument …]")


@attrs.frozen
class File:
    """The spec. path is absolute and beneath options.root, or relative to that root."""

    path: str
    content: str | None = None
    source: str | None = None  # relative to the manifest, and beneath its directory
    mode: str | None = attrs.field(default=None, validator=_validate_mode)
    owner: str | None = None  # a name or a number
    group: str | None = None
    validate: list[str] = attrs.field(factory=list, validator=_validate_command)
    after: list[str] = attrs.field(factory=list, validator=_validate_command)

    def __attrs_post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: write one like /etc/motd")
        if (self.content is None) == (self.source is None):
            raise ValueError("write either content or source")

    @property
    def permissions(self) -> int | None:
        """The mode as a number."""
        return None if self.mode is None else int(self.mode, 8)


def _validate_absolute(_options: Any, _field: Any, root: str) -> None:
    if not root.startswith("/"):
        raise ValueError(f"root {root!r} is relative: write an absolute directory")


@attrs.frozen
class FileOptions:
    """root: no path and no symlink leads out of it."""

    root: str = attrs.field(default="/", validator=_validate_absolute)


class FileReconciler(Reconciler[File]):
    """See the module's invariants. Relative programs and sources start at the manifest."""

    kind = "File"
    Options: ClassVar[type | None] = FileOptions

    def __init__(self, options: FileOptions | None = None) -> None:
        super().__init__(options or FileOptions())

    async def reconcile(self, request: Request[File]) -> Result:
        """Replace the file unless it is as desired, then run the action."""
        try:
            return await self._reconcile(request)
        except FileRefused as exc:
            return terminal(str(exc))
        except (OSError, ProgramFailed) as exc:
            return retry(_error_text(exc))

    async def remove(self, request: Request[File]) -> Result:
        """Remove the file if it holds what this reconciler wrote; leave it otherwise."""
        try:
            return await self._remove(request)
        except FileRefused as exc:
            return terminal(str(exc))
        except OSError as exc:
            return retry(_error_text(exc))

    async def plan(self, request: Request[File]) -> list[Change]:
        """What reconcile() would do. Raises FileRefused and OSError where it would fail."""
        spec = request.spec
        content = await _desired_content(request)
        found = await self._compare(spec, content)
        note = await WriteRecord.read(request.memory)
        changes = []
        if found.differences:
            changes.append(await self._describe_change(spec, content, found))
        if spec.after and (found.differences or note.after_pending):
            changes.append(Change("run", " ".join(spec.after), "after the change of the file"))
        former = "the spec names another path now"
        return [
            *changes,
            *(Change("remove", path, former) for path in note.former_paths(spec.path)),
        ]

    async def _reconcile(self, request: Request[File]) -> Result:
        spec = request.spec
        content = await _desired_content(request)
        found = await self._compare(spec, content)
        note = await WriteRecord.read(request.memory)
        # Left behind by a process that died between writing and renaming.
        unfinished = note.temporary is not None or note.after_pending
        if not (found.differences or unfinished or note.former_paths(spec.path)):
            return done()
        async with (
            request.operation("write") as operation,
            operation.critical(budget=min(BUDGET, request.critical_limit)),
        ):
            await self._remove_temporary(note)
            if found.differences:
                name = temporary_name(spec.path)
                note = note.begin(
                    spec.path, digest_of(content), name, after_pending=bool(spec.after)
                )
                await note.save(request.memory)
                await operation.step(
                    "replace", partial(self._replace, request, operation, content, name)
                )
            if note.after_pending and spec.after:
                await operation.step("after", partial(_run_after, request, operation))
            note = await self._remove_former_paths(request, operation, note)
            await note.finish().save(request.memory)
        return done(_summary(found, ran=note.after_pending and bool(spec.after)))

    async def _compare(self, spec: File, content: bytes) -> Comparison:
        return await compare_file(
            spec.path,
            content,
            mode=spec.permissions,
            owner=spec.owner,
            group=spec.group,
            root=self.options.root,
        )

    async def _replace(
        self, request: Request[File], operation: Operation, content: bytes, temporary: str
    ) -> dict[str, Any]:
        spec = request.spec

        async def validate(staged: str) -> None:
            ended = await run_program(
                [*spec.validate, staged],
                output=operation.directory,
                name="validate",
                directory=request.base,
            )
            ended.check()

        replaced = await replace_file(
            spec.path,
            content,
            mode=spec.permissions,
            owner=spec.owner,
            group=spec.group,
            root=self.options.root,
            validate=validate if spec.validate else None,
            temporary=temporary,
        )
        if replaced.lost:
            request.log.warning("file.attributes_lost", path=spec.path, names=replaced.lost)
        return {"changed": replaced.changed}

    async def _remove_temporary(self, note: WriteRecord) -> None:
        """Remove the new file that an interrupted replacement left, by its recorded name."""
        if note.temporary is not None:
            path, name = note.temporary
            try:
                await remove_temporary(path, name, root=self.options.root)
            except (FileNotFoundError, FileRefused):
                return  # its directory is gone, or lies outside a root set since: not ours now

    async def _remove_former_paths(
        self, request: Request[File], operation: Operation, note: WriteRecord
    ) -> WriteRecord:
        """Remove the files at paths that the spec named before."""
        for path in note.former_paths(request.spec.path):
            take_away = partial(self._remove_written, request, note.files[path], path)
            await operation.step(f"remove {path}", take_away)
            note = note.without(path)
        return note

    async def _remove_written(
        self, request: Request[File], digests: tuple[str, ...], path: str
    ) -> str:
        removed = await remove_file(path, digests, root=self.options.root)
        if removed is Removed.UNMANAGED:
            request.log.warning(
                "file.not_removed", path=path, reason="its content is not what was written"
            )
        return removed.value

    async def _remove(self, request: Request[File]) -> Result:
        path = request.spec.path
        note = await WriteRecord.read(request.memory)
        if path not in note.files:
            request.log.warning(
                "file.not_removed", path=path, reason="it was never written from here"
            )
        if not note.files and note.temporary is None:
            return done(f"left {path}")
        async with (
            request.operation("remove") as operation,
            operation.critical(budget=min(BUDGET, request.critical_limit)),
        ):
            await self._remove_temporary(note)
            for path, digests in note.files.items():
                take_away = partial(self._remove_written, request, digests, path)
                await operation.step(f"remove {path}", take_away)
            await WriteRecord.erase(request.memory)
        return done("removed what was written")

    async def _describe_change(self, spec: File, content: bytes, found: Comparison) -> Change:
        missing = "missing" in found.differences
        old = b""
        if "content" in found.differences:
            old = await read_file(spec.path, root=self.options.root)
        details = [name for name in found.differences if name not in ("missing", "content")]
        if missing or "content" in found.differences:
            private = is_private(spec.permissions, found.mode)
            details.append(describe_change(spec.path, old, content, private=private))
        return Change("create" if missing else "change", spec.path, "\n".join(details))


async def _desired_content(request: Request[File]) -> bytes:
    spec = request.spec
    if spec.content is not None:
        return spec.content.encode()
    assert spec.source is not None
    return await read_file(spec.source, root=request.base, follow=True)


async def _run_after(request: Request[File], operation: Operation) -> None:
    ended = await run_program(
        request.spec.after, output=operation.directory, name="after", directory=request.base
    )
    ended.check()


def _summary(found: Comparison, *, ran: bool) -> str:
    """What a run did, for the log."""
    what = ", ".join(found.differences).replace("missing", "created")
    return "; ".join(part for part in (what, "after was run" if ran else "") if part) or "cleared"


def _error_text(exc: OSError | ProgramFailed) -> str:
    """An error in one line, without the number that OSError puts in front."""
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{Path(str(exc.filename))}: {exc.strerror}"
    return str(exc)
