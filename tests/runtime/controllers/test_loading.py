"""Loading of controllers: which faults stall one, and which make the configuration invalid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from one_controller import ScriptedReconciler, Thing, plugin_of

from reconciled.config.load import load
from reconciled.config.manifests import Parser
from reconciled.core.errors import Invalid
from reconciled.core.sources import Watcher
from reconciled.runtime.controllers.factory import build_watchers, spec_reader
from reconciled.runtime.controllers.loading import (
    LoadedController,
    PreparedConfig,
    prepare,
    prepare_valid,
)

PLUGIN = """
import attrs
from reconciled.api import Reconciler, done

@attrs.frozen
class Spec:
    a: int = 0

class Good(Reconciler[Spec]):
    async def reconcile(self, request): return done()

class Waits(Good):
    async def recover(self, interrupted, observation): return None

class Exits(Good):
    def __init__(self, options): raise SystemExit(3)
"""


def prepared(tmp_path: Path, controllers: str) -> PreparedConfig:
    (tmp_path / "plugins").mkdir(mode=0o755)
    (tmp_path / "plugins" / "mine.py").write_text(PLUGIN)
    (tmp_path / "plugins" / "broken.py").write_text("import sys; sys.exit(3)")
    for file in (tmp_path / "plugins").iterdir():
        file.chmod(0o644)
    config = tmp_path / "r.yaml"
    config.write_text(f"state: s\nplugins: {{directories: [plugins]}}\ncontrollers:\n{controllers}")
    config.chmod(0o600)
    return prepare(load(config, {}).config)


def test_a_broken_reconciler_stalls_its_controller_alone(tmp_path: Path) -> None:
    """A reconciler that fails at import or construction stalls its own controller alone (C15)."""
    found = prepared(
        tmp_path,
        "  a: {reconciler: 'mine:Good', watch: [{directory: a}]}\n"
        "  b: {reconciler: 'broken:X', watch: [{directory: b}]}\n"
        "  c: {reconciler: 'mine:Exits', watch: [{directory: c}]}\n"
        "  d: {reconciler: 'mine:Waits', watch: [{directory: d}]}\n",
    )
    assert [ready.config.name for ready in found.ready] == ["a"]
    assert [stalled.config.name for stalled in found.stalled] == ["b", "c", "d"]
    assert "sys.exit(3)" in found.stalled[0].reason
    assert "SystemExit: 3" in found.stalled[1].reason
    assert "its method recover is async" in found.stalled[2].reason
    assert found.problems == ()
    assert prepare_valid(found.config).ready


def test_a_name_that_is_not_found_is_invalid(tmp_path: Path) -> None:
    """An unknown reconciler is a problem with its location and a suggestion (C13)."""
    found = prepared(tmp_path, "  a: {reconciler: 'mine:Goood', watch: [{directory: a}]}\n")
    (problem,) = found.problems
    assert str(problem).startswith(f"{tmp_path}/r.yaml:4:")
    assert "did you mean Good?" in problem.message
    with pytest.raises(Invalid):
        prepare_valid(found.config)


def test_two_controllers_with_one_kind_and_directory_are_invalid(tmp_path: Path) -> None:
    """Two controllers that take one kind from one directory are a problem."""
    found = prepared(
        tmp_path,
        "  a: {reconciler: 'mine:Good', watch: [{directory: m}]}\n"
        "  b: {reconciler: 'mine:Good', watch: [{directory: m}]}\n",
    )
    assert "both take Spec" in found.problems[0].message


class Budgeted(ScriptedReconciler):
    """budget() returns or raises what the spec says."""

    def budget(self, spec: Thing) -> float | None:
        answers: dict[int, Any] = {0: None, 60: 60.0, 61: 61.0, 7: "seven"}
        if spec.value in answers:
            given: float | None = answers[spec.value]
            return given
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, ""),
        (60, ""),
        (61, "the critical budget 1m1s exceeds stop.critical (1m)"),
        (7, "budget() failed: TypeError: "),
        (8, "budget() failed: SystemExit: 3"),
        ("x", "spec.value"),
    ],
)
def test_a_budget_is_checked_with_its_manifest(value: Any, message: str) -> None:
    """A budget above stop.critical, or a failing budget(), is a problem of its manifest alone."""
    ready: Any = LoadedController(config=None, plugin=plugin_of(Budgeted()), reconciler=Budgeted())  # type: ignore[arg-type]
    parser = Parser(spec_reader(ready, lambda: 60.0))
    text = "".join(
        f"---\nkind: Thing\nmetadata: {{name: {name}}}\nspec: {{value: {given}}}\n"
        for name, given in (("a", value), ("b", 0))
    )
    manifests, problems = parser.parse(text.encode(), "x.yaml")
    assert [manifest.name for manifest in manifests] == (["b"] if message else ["a", "b"])
    assert [message in str(problem) for problem in problems] == [True] * bool(message)


def test_other_kinds_are_not_checked() -> None:
    """Manifests of a kind that the controller does not take are not checked."""
    ready: Any = LoadedController(config=None, plugin=plugin_of(Budgeted()), reconciler=Budgeted())  # type: ignore[arg-type]
    parser = Parser(spec_reader(ready, lambda: 60.0))
    manifests, problems = parser.parse(
        b"kind: Other\nmetadata: {name: a}\nspec: {anything: 1}\n", "x.yaml"
    )
    assert (len(manifests), problems) == (1, [])


def test_each_watch_has_its_watcher(tmp_path: Path) -> None:
    """Each configured watch makes a watcher; directories declare, timers do not."""
    found = prepared(
        tmp_path,
        "  a: {reconciler: 'mine:Good', watch: [{directory: m}, {every: 10m},"
        " {cron: '0 4 * * *', zone: Europe/Berlin}]}\n",
    )
    watchers: list[Watcher] = list(build_watchers(found.ready[0], lambda: 60.0))
    assert [(watcher.name, watcher.declares) for watcher in watchers] == [
        (f"directory {tmp_path}/m", True),
        ("every 10m", False),
        ("cron 0 4 * * * Europe/Berlin", False),
    ]


async def test_a_changed_limit_counts_at_once() -> None:
    """The validator reads stop.critical at each call, since a reload may change it."""
    limit = 60.0
    ready: Any = LoadedController(config=None, plugin=plugin_of(Budgeted()), reconciler=Budgeted())  # type: ignore[arg-type]
    parser = Parser(spec_reader(ready, lambda: limit))
    text = b"kind: Thing\nmetadata: {name: a}\nspec: {value: 61}\n"
    assert parser.parse(text, "x.yaml")[0] == []
    limit = 61.0
    assert len(parser.parse(text, "x.yaml")[0]) == 1
    await trio.lowlevel.checkpoint()
