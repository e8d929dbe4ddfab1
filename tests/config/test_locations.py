"""Finding state directory and socket with a configuration that need not be valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reconciled.config import locations
from reconciled.config.load import load
from reconciled.config.locations import find_socket, find_state

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
        "{controllers: {}, plugins: {directories: ['#']}, state: /s/x}\n",
    ],
)
def test_the_configured_directory_comes_first(tmp_path: Path, text: str) -> None:
    """The configuration comes before $STATE_DIRECTORY, as in the daemon."""
    assert find_state(written(tmp_path, text), {"STATE_DIRECTORY": "/e"}) == Path("/s/x")


def test_the_state_directory_is_that_of_the_daemon(tmp_path: Path) -> None:
    """For a valid configuration it is what the daemon uses, in whatever file and form."""
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
def test_without_a_configured_directory_the_environment_counts(tmp_path: Path, text: str) -> None:
    """With a comment, a nested key, or no value, the first of $STATE_DIRECTORY counts."""
    main = written(tmp_path, text)
    assert find_state(main, {"STATE_DIRECTORY": "/e:/f"}) == Path("/e")
    assert find_state(main, {}) is None


def test_the_part_before_a_syntax_error_counts(tmp_path: Path) -> None:
    """A configuration that the daemon would refuse still gives the state directory."""
    main = written(tmp_path, "state: /s/x\nunknown: 1\ncontrollers: [\n")
    assert find_state(main, {"STATE_DIRECTORY": "/e"}) == Path("/s/x")


def test_unreadable_configuration(tmp_path: Path) -> None:
    """If the file is missing or is a directory, the environment counts."""
    assert find_state(tmp_path / "none.yaml", {"STATE_DIRECTORY": "/e"}) == Path("/e")
    assert find_state(tmp_path, {}) is None


@pytest.mark.processes
def test_the_parser_is_imported_only_when_needed(tmp_path: Path) -> None:
    """If no file names state or socket, the parser is not imported: it takes half the time."""
    main = written(tmp_path, "# state: /x\n# control: {socket: /x}\n" + VALID)
    script = (
        "import sys; from pathlib import Path; from reconciled.config.locations import *;"
        f" find_state(Path({str(main)!r}), {{}}); find_socket(Path({str(main)!r}), {{}});"
        "print('yaml' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


# -- the control socket ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "control: {socket: /s/x}\n",
        "{include: ['#'], control: {socket: /s/x}}\n",
        "control:\n  socket: '../x'  # here\nstate: /y\ncontrollers: [\n",
    ],
)
def test_the_configured_socket_comes_first(tmp_path: Path, text: str) -> None:
    """The configuration comes before every default, even if it is invalid."""
    main = written(tmp_path / "s", text)
    found = find_socket(main, {"RUNTIME_DIRECTORY": "/r", "STATE_DIRECTORY": "/e"})
    assert found == (tmp_path / "x" if ".." in text else Path("/s/x"))


def test_the_socket_is_that_of_the_daemon(tmp_path: Path) -> None:
    """For a valid configuration it is what the daemon uses, in whatever file."""
    written(tmp_path, "control: {socket: s}\n", "conf.d/a.yaml")
    main = written(tmp_path, VALID + "state: state\n")
    assert find_socket(main, {}) == load(main, {}).config.control == tmp_path / "conf.d/s"
    (tmp_path / "conf.d/a.yaml").unlink()
    for environ in ({"RUNTIME_DIRECTORY": "/r:/q"}, {}):
        assert find_socket(main, environ) == load(main, environ).config.control


@pytest.mark.parametrize("name", ["reconciled", "reconciled-site"])
def test_a_person_finds_the_socket_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the configuration of an installed service, and no environment, its socket is found.

    With any other configuration it is not: that would be another daemon, or none of ours.
    """
    monkeypatch.setattr(locations, "_ETC", tmp_path / "etc")
    monkeypatch.setattr(locations, "_RUN", tmp_path / "run")
    (tmp_path / "etc").mkdir()
    main = written(tmp_path / "etc", VALID + "state: state\n", f"{name}/reconciled.yaml")
    assert find_socket(main, {}) == tmp_path / f"run/{name}/control.sock"
    (main.parent / "state").mkdir()
    (main.parent / "state/control.sock").touch()  # a daemon that no manager has started
    assert find_socket(main, {}) == main.parent / "state/control.sock"
    (tmp_path / f"run/{name}").mkdir(parents=True)
    (tmp_path / f"run/{name}/control.sock").touch()
    assert find_socket(main, {}) == tmp_path / f"run/{name}/control.sock"
    for other in ("etc/docker", "opt/reconciled"):
        (tmp_path / other).mkdir(parents=True)
        assert find_socket(written(tmp_path / other, VALID), {}) is None


def test_a_changed_socket_still_finds_the_running_daemon(tmp_path: Path) -> None:
    """The daemon still listens on its old socket: it is found there, and can report the change."""
    (tmp_path / "control.sock").touch()
    main = written(tmp_path, f"state: {tmp_path}\ncontrol: {{socket: new}}\n" + VALID)
    assert find_socket(main, {}) == tmp_path / "control.sock"
    (tmp_path / "new").touch()
    assert find_socket(main, {}) == tmp_path / "new"


def test_a_socket_that_cannot_be_seen_counts_as_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without permission to see it, the socket counts as present: connecting reports the error."""

    def stat(path: Path, **_: object) -> None:
        raise PermissionError if path == tmp_path / "closed/control.sock" else FileNotFoundError

    main = written(tmp_path, f"state: {tmp_path}\ncontrol: {{socket: new}}\n" + VALID)
    monkeypatch.setattr(Path, "stat", stat)
    environ = {"RUNTIME_DIRECTORY": str(tmp_path / "closed")}
    assert find_socket(main, environ) == tmp_path / "closed/control.sock"


@pytest.mark.parametrize("name", ["x" * 300, '"a\\0b"'])
def test_an_invalid_socket_path_is_not_refused(tmp_path: Path, name: str) -> None:
    """An invalid path is not a fault here: the daemon reports what is wrong with it."""
    main = written(tmp_path, f"control: {{socket: {name}}}\ninclude: [{name}]\n" + VALID)
    found = find_socket(main, {})
    assert found is not None
    assert found.parent == tmp_path
