"""A configuration directory, and verbs run against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from reconciled.cli import main
from reconciled.core.resources import Key, fingerprint_of
from reconciled.journal.sqlite.store import Store

PLUGIN = """
import attrs
from reconciled.api import Change, Reconciler, Terminal, done

@attrs.frozen
class Note:
    text: str = ""
    seconds: float = 0.0

class NoPlan(Reconciler[Note]):
    async def reconcile(self, request):
        return done()

    def budget(self, spec):
        return spec.seconds or None


class Noter(NoPlan):
    async def remove(self, request):
        return done()

    async def plan(self, request):
        text = request.spec.text
        if text == "exits":
            raise SystemExit(3)
        if text == "refuses":
            raise Terminal("no such user")
        if text == "garbage":
            return ["x"]
        if text == "nothing":
            return None
        if text == "acts":
            async with request.operation("write"):
                pass
        if text == "same" or request.applied == request.fingerprint:
            return []
        return [Change("write", "/etc/note", "- old\\n+ " + text)]

class NeedsOptions(NoPlan):
    @attrs.frozen
    class Options:
        root: str
"""


@attrs.frozen
class VerbResult:
    """The exit code and output of a verb."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """Lines of both outputs, standard error first."""
        return [*self.err.splitlines(), *self.out.splitlines()]


@attrs.define(eq=False)
class Desk:
    """A directory with r.yaml, plugins/mine.py, manifests in m/, and state/."""

    root: Path
    capfd: pytest.CaptureFixture[str]

    def __attrs_post_init__(self) -> None:
        for name in ("m", "plugins"):
            (self.root / name).mkdir(mode=0o755)
        self.write("plugins/mine.py", PLUGIN, mode=0o644)

    @property
    def state(self) -> Path:
        return self.root / "state"

    def write(self, name: str, text: str, mode: int = 0o600) -> Path:
        """Write a file below the root."""
        file = self.root / name
        file.write_text(text)
        file.chmod(mode)
        return file

    def configure(self, controllers: str = "", *, head: str = "") -> None:
        """Write r.yaml, by default with one controller ``c`` that takes Notes from m."""
        one = "  c: {reconciler: 'mine:Noter', watch: [{directory: m}]}\n"
        self.write(
            "r.yaml",
            f"state: state\nplugins: {{directories: [plugins]}}\n{head}"
            f"controllers:\n{controllers or one}",
        )

    def declare(self, name: str, kind: str = "Note", **spec: Any) -> None:
        """Write a manifest in m."""
        data = {"kind": kind, "metadata": {"name": name}, "spec": spec}
        self.write(f"m/{name}.yaml", json.dumps(data))

    def apply(self, *names: str, complete: bool = True, **spec: Any) -> None:
        """Record Notes as applied in the store, as an earlier daemon leaves them."""
        self.state.mkdir(mode=0o700, exist_ok=True)

        async def record() -> None:
            store = Store.open(self.state)
            async with trio.open_nursery() as nursery:
                await nursery.start(store.run)
                for name in names:
                    await store.record_applied(
                        Key(name),
                        "Note",
                        spec,
                        fingerprint_of({"kind": "Note", "spec": spec}),
                        base=str(self.root / "m"),
                        complete=complete,
                    )
                nursery.cancel_scope.cancel(reason="recorded")

        trio.run(record)

    def say(self, *arguments: str) -> VerbResult:
        """Run a verb; the root is shown as ``@`` in its output."""
        self.capfd.readouterr()
        try:
            code = main(["--config", str(self.root / "r.yaml"), *arguments])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out, err = self.capfd.readouterr()
        return VerbResult(code, out.replace(str(self.root), "@"), err.replace(str(self.root), "@"))

    def tree(self) -> dict[str, Any]:
        """Every file below state, with its content and time."""
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
            for path in sorted(self.state.rglob("*"))
        }
