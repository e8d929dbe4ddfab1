"""Rules of finding the state directory where the configuration need not be valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reconciled.config.load import load
from reconciled.config.places import find_state

VALID = "controllers: {}\n"


def written(directory: Path, text: str, name: str = "reconciled.yaml") -> Path:
    file = directory / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text",
    [
        "state: /s/x\n",
        "log: {level: info}\nstate: '/s/x'  # here\n",
        "{controllers: {}, 'state': /s/x}\n",
        'controllers: {}\n"state" : "/s/x"\n',
    ],
)
def test_the_configured_directory_comes_first(tmp_path: Path, text: str) -> None:
    """What the configuration says comes before $STATE_DIRECTORY, as for the daemon."""
    assert find_state(written(tmp_path, text), {"STATE_DIRECTORY": "/e"}) == Path("/s/x")


def test_it_is_what_the_daemon_takes(tmp_path: Path) -> None:
    """For a valid configuration it is the daemon's own answer, wherever and however it stands."""
    written(tmp_path, "state: ../up/./state\n", "more/one.yaml")
    main = written(tmp_path, VALID + "include: [more/*.yaml]\n")
    assert find_state(main, {}) == load(main, {}).config.state == tmp_path / "up/state"
    written(tmp_path, "state: conf\n", "conf.d/a.yaml")
    plain = written(tmp_path, VALID)
    assert find_state(plain, {}) == load(plain, {}).config.state == tmp_path / "conf.d/conf"


@pytest.mark.parametrize(
    "text",
    [
        VALID,
        "# state: /s\n",
        "controllers: {a: {options: {state: /s}}}\n",
        "controllers:\n  state: {options: {x: /s}}\n",
        "[state, /s]\n",
        "state:\n",
    ],
)
def test_what_names_no_directory(tmp_path: Path, text: str) -> None:
    """A comment, a name further in, no value: then $STATE_DIRECTORY counts, the first of it."""
    main = written(tmp_path, text)
    assert find_state(main, {"STATE_DIRECTORY": "/e:/f"}) == Path("/e")
    assert find_state(main, {}) is None


def test_a_mistake_hides_nothing_before_it(tmp_path: Path) -> None:
    """A configuration that no daemon would take still says where the state is."""
    main = written(tmp_path, "state: /s/x\nunknown: 1\ncontrollers: [\n")
    assert find_state(main, {"STATE_DIRECTORY": "/e"}) == Path("/s/x")


def test_unreadable_configuration(tmp_path: Path) -> None:
    """No file, a directory in its place: the environment counts."""
    assert find_state(tmp_path / "none.yaml", {"STATE_DIRECTORY": "/e"}) == Path("/e")
    assert find_state(tmp_path, {}) is None


@pytest.mark.processes
def test_the_parser_is_left_alone(tmp_path: Path) -> None:
    """Where nothing names a state directory, no parser is imported: that takes half the time."""
    main = written(tmp_path, "# state: /x\n" + VALID)
    script = (
        "import sys; from pathlib import Path; from reconciled.config.places import find_state;"
        f" find_state(Path({str(main)!r}), {{}}); print('yaml' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
