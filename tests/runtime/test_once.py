"""``run --once`` as a real process: every key has its turn, then it stops at once, and tells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

pytestmark = pytest.mark.processes

# Less than the default drain of 20 s: to sleep through the drain is a failure.
BOUND = 15.0
CONFIG = """\
state: {here}/state
plugins: {{directories: [plugins]}}
controllers:
  files:
    reconciler: file
    watch: [directory: resources]
    options: {{root: {here}}}
"""
STALLED = """\
  broken:
    reconciler: broken:Broken
    watch: [directory: resources]
"""


@attrs.frozen
class Ran:
    """How it ended, and what it said."""

    code: int
    lines: list[dict[str, Any]]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The lines of event *name*."""
        return [line for line in self.lines if line["event"] == name]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A configuration with one File."""
    for directory in ("resources", "plugins"):
        (tmp_path / directory).mkdir()
    (tmp_path / "reconciled.yaml").write_text(CONFIG.format(here=tmp_path))
    declare(tmp_path, "good", str(tmp_path / "good.txt"))
    return tmp_path


def declare(site: Path, name: str, path: str) -> None:
    """Declare a file at *path*."""
    (site / f"resources/{name}.yaml").write_text(
        f"kind: File\nmetadata: {{name: {name}}}\nspec: {{path: {path}, content: x}}\n"
    )


def run_once(site: Path) -> Ran:
    """Run it to its end."""
    ended = subprocess.run(
        [
            str(Path(sys.executable).with_name("reconciled")),
            *("--config", str(site / "reconciled.yaml"), "run", "--once"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND,
        check=False,
    )
    return Ran(ended.returncode, [json.loads(line) for line in ended.stdout.splitlines()])


def test_it_ends_as_soon_as_every_key_is_done(site: Path) -> None:
    """It waits for no signal, and for no drain, and says once why it stops."""
    for _ in range(2):  # the second time there is nothing to do
        ran = run_once(site)
        assert ran.code == 0, ran.lines
        assert len(ran.events("stop.began")) == 1
    assert (site / "good.txt").read_text() == "x"


def test_it_names_each_key_that_is_not_done(site: Path) -> None:
    """A key that fails for good gives exit code 4 and its own line; the others are done."""
    declare(site, "outside", "/outside/of/the/root")
    ran = run_once(site)
    assert ran.code == 4, ran.lines
    assert [line["key"] for line in ran.events("once.not_done")] == ["files/outside"]
    assert (site / "good.txt").exists()


def test_a_stalled_controller_is_not_done(site: Path) -> None:
    """Keys of a controller that could not be loaded were not looked at: that is not success."""
    with (site / "reconciled.yaml").open("a") as config:
        config.write(STALLED)
    (site / "plugins/broken.py").write_text("import nowhere_to_be_found\n")
    ran = run_once(site)
    assert ran.code == 4, ran.lines
    assert [line["source"] for line in ran.events("once.unread")] == ["controller broken"]
