"""The ``file`` reconciler: one file with content, mode and owner, and an action after a change.

1. A run that finds the file as desired only reads.
2. ``validate`` gets the complete new file before the rename; if it fails, the old file is kept.
3. ``after`` runs after every replacement, even if interruptions come between the two.
4. Only content that this reconciler wrote is removed.
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

# Seconds for replacement, validate and after together; reduced to stop.critical if that is less.
BUDGET = 60.0
_MODE = re.compile(r"0?[0-7]{3,4}")


def _validate_mode(_spec: Any, _field: Any, mode: str | None) -> None:
    if mode is not None and not _MODE.fullmatch(mode):
        raise ValueError(f'mode {mode!r} is invalid: write it as quoted octal digits, as in "0644"')


def _validate_command(_spec: Any, field: attrs.Attribute[list[str]], argv: list[str]) -> None:
    if argv and not argv[0]:
        raise ValueError(f"{field.name} has an empty program: write it as [program, argument …]")


@attrs.frozen
class File:
    """The spec of kind File. path is absolute and beneath options.root, or relative to it."""

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
    """root: a path or symlink that leads out of it is refused."""

    root: str = attrs.field(default="/", validator=_validate_absolute)


class FileReconciler(Reconciler[File]):
    """Reconciles one File. Relative programs and sources start at the manifest's directory."""

    kind = "File"
    Options: ClassVar[type | None] = FileOptions

    def __init__(self, options: FileOptions | None = None) -> None:
        super().__init__(options or FileOptions())

    async def reconcile(self, request: Request[File]) -> Result:
        """Replace the file unless it is as desired, then run ``after``."""
        try:
            return await self._reconcile(request)
        except FileRefused as exc:
            return terminal(str(exc))
        except (OSError, ProgramFailed) as exc:
            return retry(_error_text(exc))

    async def remove(self, request: Request[File]) -> Result:
        """Remove the file if it has content that this reconciler wrote; otherwise keep it."""
        try:
            return await self._remove(request)
        except FileRefused as exc:
            return terminal(str(exc))
        except OSError as exc:
            return retry(_error_text(exc))

    async def plan(self, request: Request[File]) -> list[Change]:
        """The changes that reconcile() would make. Raises FileRefused, OSError if it would fail."""
        spec = request.spec
        content = await _desired_content(request)
        found = await self._compare(spec, content)
        record = await WriteRecord.read(request.memory)
        changes = []
        if found.differences:
            changes.append(await self._describe_change(spec, content, found))
        if spec.after and (found.differences or record.after_pending):
            changes.append(Change("run", " ".join(spec.after), "after the change of the file"))
        former = "the spec names another path"
        return [
            *changes,
            *(Change("remove", path, former) for path in record.former_paths(spec.path)),
        ]

    async def _reconcile(self, request: Request[File]) -> Result:
        spec = request.spec
        content = await _desired_content(request)
        found = await self._compare(spec, content)
        record = await WriteRecord.read(request.memory)
        # Set if a process was killed before the end of an earlier replacement.
        unfinished = record.temporary is not None or record.after_pending
        if not (found.differences or unfinished or record.former_paths(spec.path)):
            return done()
        async with (
            request.operation("write") as operation,
            operation.critical(budget=min(BUDGET, request.critical_limit)),
        ):
            await self._remove_temporary(record)
            if found.differences:
                name = temporary_name(spec.path)
                record = record.begin(
                    spec.path, digest_of(content), name, after_pending=bool(spec.after)
                )
                await record.save(request.memory)
                await operation.step(
                    "replace", partial(self._replace, request, operation, content, name)
                )
            if record.after_pending and spec.after:
                await operation.step("after", partial(_run_after, request, operation))
            record = await self._remove_former_paths(request, operation, record)
            await record.finish().save(request.memory)
        return done(_summary(found, ran=record.after_pending and bool(spec.after)))

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

    async def _remove_temporary(self, record: WriteRecord) -> None:
        """Remove the new file that an interrupted replacement left, by its recorded name."""
        if record.temporary is not None:
            path, name = record.temporary
            try:
                await remove_temporary(path, name, root=self.options.root)
            except (FileNotFoundError, FileRefused):
                return  # its directory was removed, or is outside a root that was changed since

    async def _remove_former_paths(
        self, request: Request[File], operation: Operation, record: WriteRecord
    ) -> WriteRecord:
        """Remove the files at paths that the spec named earlier."""
        for path in record.former_paths(request.spec.path):
            remove_step = partial(self._remove_written, request, record.files[path], path)
            await operation.step(f"remove {path}", remove_step)
            record = record.without(path)
        return record

    async def _remove_written(
        self, request: Request[File], digests: tuple[str, ...], path: str
    ) -> str:
        removed = await remove_file(path, digests, root=self.options.root)
        if removed is Removed.UNMANAGED:
            request.log.warning(
                "file.not_removed", path=path, reason="its content was changed after it was written"
            )
        return removed.value

    async def _remove(self, request: Request[File]) -> Result:
        path = request.spec.path
        record = await WriteRecord.read(request.memory)
        if path not in record.files:
            request.log.warning(
                "file.not_removed", path=path, reason="this reconciler never wrote it"
            )
        if not record.files and record.temporary is None:
            return done(f"kept {path}")
        async with (
            request.operation("remove") as operation,
            operation.critical(budget=min(BUDGET, request.critical_limit)),
        ):
            await self._remove_temporary(record)
            for path, digests in record.files.items():
                remove_step = partial(self._remove_written, request, digests, path)
                await operation.step(f"remove {path}", remove_step)
            await WriteRecord.erase(request.memory)
        return done("removed")

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
    """The actions of a run, for the log."""
    what = ", ".join(found.differences).replace("missing", "created")
    parts = (what, "ran after" if ran else "")
    return "; ".join(part for part in parts if part) or "finished an interrupted write"


def _error_text(exc: OSError | ProgramFailed) -> str:
    """An error in one line, without the errno that OSError prints."""
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{Path(str(exc.filename))}: {exc.strerror}"
    return str(exc)
