"""Loading: one configuration from all files, or all of their problems."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reconciled.config.load import LoadedConfig, find_config, load, not_built_lines
from reconciled.config.model import Config
from reconciled.config.structuring.field_types import Share
from reconciled.config.watches import CronWatch, DirectoryWatch, EveryWatch
from reconciled.core.durations import Seconds, format_duration
from reconciled.core.errors import Invalid
from reconciled.core.stages import StopLimits

MINIMAL = """
state: /var/lib/x
controllers:
  site:
    reconciler: exec
    watch: [{directory: resources}]
"""

CONTRACT = """
state: /var/lib/reconciled
include: [conf.d/*.yaml]
log: {format: auto, level: info}
stop:
  drain: 20s
  critical: 5m
  cleanup: 5s
limits: {concurrency: 16}
journal: {history: {operations: 100000, age: 90d}}
http: {listen: "127.0.0.1:9464"}
control: {socket: /run/reconciled/control.sock}
plugins: {directories: [plugins]}
controllers:
  site:
    reconciler: exec
    watch:
      - directory: resources
      - every: 10m
      - every: {interval: 10m, jitter: 20%}
      - cron: "0 4 * * *"
        zone: Europe/Berlin
    concurrency: 4
    timeout: 2m
    retry: {initial: 1s, max: 5m}
    interrupted: roll-forward
    max_recoveries: 3
    removals: {share: 50%, above: 4}
    options: {}
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    return path


def loaded(folder: Path, text: str, environ: dict[str, str] | None = None) -> LoadedConfig:
    return load(write(folder / "c.yaml", text), environ or {})


def config(folder: Path, text: str, environ: dict[str, str] | None = None) -> Config:
    return loaded(folder, text, environ).config


def problems(folder: Path, text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(Invalid) as caught:
        loaded(folder, text, environ)
    return [str(problem).removeprefix(f"{folder}/") for problem in caught.value.problems]


def test_the_documented_configuration(tmp_path: Path) -> None:
    """The example of the documentation is valid, and has the documented values."""
    result = config(tmp_path, CONTRACT)
    assert result.state == Path("/var/lib/reconciled")
    assert result.stop == StopLimits(drain=20, critical=300, cleanup=5)
    assert result.stop.budget == 308
    assert result.http is not None
    assert (result.http.host, result.http.port) == ("127.0.0.1", 9464)
    assert result.control == Path("/run/reconciled/control.sock")
    assert result.plugins.directories == (tmp_path / "plugins",)
    directory, short, long, cron = result.controllers["site"].watch
    assert directory == DirectoryWatch(tmp_path / "resources", directory.origin)
    assert short == EveryWatch(Seconds(600), Share(0.1), short.origin)
    assert long == EveryWatch(Seconds(600), Share(0.2), long.origin)
    assert cron == CronWatch("0 4 * * *", "Europe/Berlin", cron.origin)
    assert str(cron.origin) == f"{tmp_path}/c.yaml:21:9"


def test_defaults_are_the_documented_ones(tmp_path: Path) -> None:
    """An omitted name has the value that the example shows."""
    full = config(tmp_path / "a", CONTRACT)
    short = config(tmp_path / "b", MINIMAL)
    for name in ("log", "stop", "limits", "journal"):
        assert getattr(full, name) == getattr(short, name)
    one, other = full.controllers["site"], short.controllers["site"]
    for field in attrs.fields(type(one)):
        if field.eq and field.name != "watch":
            assert getattr(one, field.name) == getattr(other, field.name)
    assert short.http is None
    assert short.control == Path("/var/lib/x/control.sock")


def test_only_what_was_written_is_named_as_not_built(tmp_path: Path) -> None:
    """A name that is only partly built is reported where a person wrote it, a default never."""
    text = """state: /x
journal: {history: {age: 1d}}
controllers:
  a:
    reconciler: exec
    watch: [{every: 1m}]
    interrupted: hold
"""
    names = {"http": "x", "journal.history": "y", "controllers.*.interrupted": "z"}
    assert not_built_lines(config(tmp_path, text), names) == [
        f"{tmp_path}/c.yaml:2:11: journal.history y",
        f"{tmp_path}/c.yaml:7:5: controllers.a.interrupted z",
    ]


def test_moved_lines_are_no_change(tmp_path: Path) -> None:
    """Controllers that only moved in their file are equal: a reload does not restart them."""
    before = config(tmp_path, MINIMAL)
    after = config(tmp_path, "# more\n\n" + MINIMAL + "    concurrency: 4\n")
    assert before == after
    assert before.controllers["site"].origin != after.controllers["site"].origin


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stat: /x\n", "c.yaml:1:1: unknown key stat: did you mean state?"),
        ("stop: {drain: 10m}\n", "1:15: stop.drain: is longer than critical (5m)"),
        ("stop: {critical: 5s}\n", "1:7: stop.drain: is longer than critical (5s)"),
        ("stop: {cleanup: 0s}\n", "1:17: stop.cleanup: must be longer than 0s"),
        ("stop: {drain: 20}\n", "1:15: stop.drain: takes a duration with a unit"),
        ("stop: [drain]\n", "1:7: stop: takes a mapping of critical, drain, cleanup"),
        ("log: {level: warn}\n", "1:14: log.level: unknown value warn: did you mean warning?"),
        ("limits: {concurrency: 0}\n", "1:23: limits.concurrency: must be at least 1, got 0"),
        ('http: {listen: "9464"}\n', "1:16: http.listen: takes HOST:PORT"),
        ('http: {listen: "x:99999"}\n', "1:16: http.listen: takes HOST:PORT"),
        ("http: {}\n", "1:7: http: listen is missing"),
        ("include: x\n", "1:10: include: takes a list, got text"),
        ('include: ["a\\0/*.yaml"]\n', "1:11: include[0]: takes a path, and no path has"),
        ("include: [gone.yaml]\n", "1:11: include[0]: gone.yaml does not exist"),
        ("log: {}\n---", "3:1: a second document: a configuration has one"),
    ],
)
def test_faults_of_the_daemon(tmp_path: Path, text: str, expected: str) -> None:
    """A fault in a section is reported at its key or value, with what to write instead."""
    (message,) = problems(tmp_path, text + MINIMAL, {"STATE_DIRECTORY": "/x"})
    assert expected in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("concurrency: 0", "6:18: controllers.site.concurrency: must be at least 1"),
        ("timeout: 0s", "must be longer than 0s"),
        (
            "retry: {initial: 10m}",
            "6:12: controllers.site.retry.max: is shorter than initial (10m)",
        ),
        ("retry: {initial: 0s}", "6:22: controllers.site.retry.initial: must be longer than 0s"),
        (
            "interrupted: rollback",
            "6:18: controllers.site.interrupted: unknown value rollback: did",
        ),
        ("max_recoveries: -1", "must be at least 0"),
        ("removals: {share: 50}", "6:23: controllers.site.removals.share: takes a percentage"),
        ("maxRecoveries: 3", "6:5: unknown key maxRecoveries: did you mean max_recoveries?"),
        ("options:", "write {} for an empty one"),
    ],
)
def test_faults_of_a_controller(tmp_path: Path, line: str, expected: str) -> None:
    """A fault in a controller is reported at its key or value."""
    text = MINIMAL.lstrip() + f"    {line}\n"
    (message,) = problems(tmp_path, text)
    assert expected in message


@pytest.mark.parametrize(
    ("watch", "expected"),
    [
        ("[]", "is empty, so the controller would never run"),
        ("{directory: x}", "takes a list, got a mapping"),
        ("[x]", "takes one of directory, every, cron"),
        ("[{}]", "names no source"),
        ("[{zone: Europe/Berlin}]", "names no source"),
        ("[{evry: 10m}]", "5:14: unknown watch evry: did you mean every?"),
        ("[{kubernetes: pods}]", "unknown watch kubernetes: it can be cron, directory, every"),
        ("[{every: 10}]", "watch[0].every: takes a duration with a unit"),
        ("[{every: 0s}]", "must be longer than 0s"),
        ("[{every: {jitter: 10%}}]", "interval is missing"),
        ("[{every: 1m, jitter: 10%}]", "unknown key jitter"),
        ("[{every: 1m, cron: x}]", "every and cron in one watch"),
        ('[{cron: "* *"}]', "watch[0].cron: Wrong number of fields: takes minute, hour"),
        ('[{cron: "99 * * * *"}]', "watch[0].cron: "),
        ('[{cron: "0 4 * * *", zone: Europe/Berlim}]', "did you mean Europe/Berlin?"),
        ('[{cron: "0 4 * * *", zone: ../etc/passwd}]', "unknown time zone ../etc/passwd"),
        ("[{directory: x}, {directory: ./y/../x}]", "is watched twice"),
    ],
)
def test_faults_of_a_watch(tmp_path: Path, watch: str, expected: str) -> None:
    """A watch that could never work is one fault, at its entry."""
    text = MINIMAL.lstrip().replace("[{directory: resources}]", watch)
    (message,) = problems(tmp_path, text)
    assert expected in message


def test_controller_names(tmp_path: Path) -> None:
    """The name of a controller is the first part of its keys, so it must be a DNS label."""
    for name in ("Site", "a/b", "a.b", "-a", "a" * 64, '""'):
        (message,) = problems(tmp_path, MINIMAL.replace("site", name))
        assert "is not a controller name" in message


def test_c13_all_problems_of_all_files(tmp_path: Path) -> None:
    """A syntax error in one file does not hide the faults of the others; nothing is loaded."""
    write(tmp_path / "conf.d/a.yaml", "controllers:\n  a: {watch: []}\n")
    write(tmp_path / "conf.d/b.yaml", "controllers: {\n")
    write(tmp_path / "conf.d/c.yaml", MINIMAL)
    text = "include: [conf.d/*.yaml]\nlog: {level: warn}\n" + MINIMAL
    found = problems(tmp_path, text)
    assert [message.rpartition(": ")[0].split(":")[0] for message in found] == [
        "c.yaml",
        "conf.d/a.yaml",
        "conf.d/a.yaml",
        "conf.d/b.yaml",
        "conf.d/c.yaml",
        "conf.d/c.yaml",
    ]


def test_conf_d_is_included_by_default(tmp_path: Path) -> None:
    """Without ``include`` the files of conf.d are included; with ``[]`` they are not."""
    (tmp_path / "conf.d").mkdir()
    write(tmp_path / "conf.d" / "more.yaml", "log: {level: warning}\n")
    assert config(tmp_path, MINIMAL).log.level == "warning"
    assert config(tmp_path, "include: []\n" + MINIMAL).log.level == "info"


def test_included_files_are_one_configuration(tmp_path: Path) -> None:
    """Sections and controllers may be in any file, and paths start at their own file."""
    write(tmp_path / "conf.d/a.yaml", "log: {level: debug}\nplugins: {directories: [p]}\n")
    write(tmp_path / "conf.d/b.yaml", MINIMAL.replace("site", "b").replace("state: /var/lib/x", ""))
    result = config(tmp_path, "include: [conf.d/*.yaml, conf.d/a.yaml, none/*.yaml]\n" + MINIMAL)
    assert result.log.level == "debug"
    assert result.plugins.directories == (tmp_path / "conf.d/p",)
    assert list(result.controllers) == ["site", "b"]
    (watch,) = result.controllers["b"].watch
    assert isinstance(watch, DirectoryWatch)
    assert watch.path == tmp_path / "conf.d/resources"
    assert [file.name for file in result.files] == ["c.yaml", "a.yaml", "b.yaml"]


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    """A name that two files set is an error with both locations: no file overrides another."""
    write(tmp_path / "d.yaml", "log: {}\n" + MINIMAL)
    found = problems(tmp_path, "include: [d.yaml]\nlog: {}\n" + MINIMAL)
    assert [message.split(": ", 1)[0] for message in found] == [
        "d.yaml:1:1",
        "d.yaml:3:1",
        "d.yaml:5:3",
    ]
    assert f"log is given in two files, first at {tmp_path}/c.yaml:2:1" in found[0]
    assert f"site is given in two files, first at {tmp_path}/c.yaml:6:3" in found[2]


def test_included_files_include_nothing(tmp_path: Path) -> None:
    """Includes are one level deep, so that they cannot be circular."""
    write(tmp_path / "d.yaml", "include: [c.yaml]\n")
    (message,) = problems(tmp_path, "include: [d.yaml]\n" + MINIMAL)
    assert message.startswith("d.yaml:1:1: include is valid in the main file only")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "c.yaml:1:1: is empty: write at least controllers: {}"),
        ("# nothing\n", "is empty"),
        ("---\n", "takes a mapping of state"),
        ("- a\n", "got a list"),
        ("text\n", "got text"),
    ],
)
def test_c14_files_without_configuration(tmp_path: Path, text: str, expected: str) -> None:
    """A file without content is a fault, never an empty configuration."""
    (message,) = problems(tmp_path, text, {"STATE_DIRECTORY": "/x"})
    assert expected in message


def test_state(tmp_path: Path) -> None:
    """The state directory is the written one, else the first of $STATE_DIRECTORY, else a fault."""
    text = MINIMAL.replace("state: /var/lib/x", "")
    environ = {"STATE_DIRECTORY": "/a:/b", "RUNTIME_DIRECTORY": "/run/x"}
    assert config(tmp_path, MINIMAL, environ).state == Path("/var/lib/x")
    result = config(tmp_path, text, environ)
    assert (result.state, result.control) == (Path("/a"), Path("/run/x/control.sock"))
    (message,) = problems(tmp_path, text)
    assert "state is missing, and $STATE_DIRECTORY is not set: add state:" in message
    (message,) = problems(tmp_path, "stat: /x\n" + text)
    assert "did you mean state?" in message


@pytest.mark.parametrize("value", ["", "state", "./x:/y", ":/y"])
def test_a_directory_variable_must_be_absolute(tmp_path: Path, value: str) -> None:
    """A variable that is not an absolute path is refused by name, if it is needed."""
    text = MINIMAL.replace("state: /var/lib/x", "")
    (message,) = problems(tmp_path, text, {"STATE_DIRECTORY": value})
    assert message == f"$STATE_DIRECTORY:1:1: is {value!r}: write an absolute path, or unset it"
    (message,) = problems(tmp_path, MINIMAL, {"RUNTIME_DIRECTORY": value})
    assert message == f"$RUNTIME_DIRECTORY:1:1: is {value!r}: write an absolute path, or unset it"
    # What is written in the file needs neither.
    written = MINIMAL + "control: {socket: /x}\n"
    config(tmp_path, written, {"STATE_DIRECTORY": value, "RUNTIME_DIRECTORY": value})


def test_the_configuration_of_a_relative_directory_is_refused() -> None:
    """A $CONFIGURATION_DIRECTORY that is not an absolute path is a fault, and nothing is read."""
    path = find_config(None, {"CONFIGURATION_DIRECTORY": "conf:/etc"})
    with pytest.raises(Invalid, match=r"\$CONFIGURATION_DIRECTORY:1:1: is 'conf': write an abs"):
        load(path, {})


def test_a_directory_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that exists and cannot be listed is a problem: it may have files."""
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "plugins").mkdir()
    monkeypatch.setattr(os, "scandir", _denied)
    included, plugins = problems(tmp_path, "plugins: {directories: [plugins]}\n" + MINIMAL)
    assert f"include[0]: {tmp_path}/conf.d cannot be listed: Permission denied for" in included
    assert plugins.startswith("c.yaml:1:25: plugins.directories[0]: ")
    assert plugins.endswith("and chmod g+rx")


def _denied(path: Path) -> None:
    raise PermissionError(13, "Permission denied", str(path))


def test_relative_paths_start_at_their_file(tmp_path: Path) -> None:
    """State and socket may be relative, and do not depend on the working directory."""
    text = MINIMAL.replace("/var/lib/x", "../state") + "control: {socket: run/s}\n"
    result = config(tmp_path / "etc", text)
    assert (result.state, result.control) == (tmp_path / "state", tmp_path / "etc/run/s")


def test_a_configuration_without_controllers_is_valid_with_a_warning(tmp_path: Path) -> None:
    """A daemon without controllers may run, with one warning."""
    (warning,) = loaded(tmp_path, "state: /x\n").warnings
    assert "no controllers" in warning.message
    assert loaded(tmp_path, MINIMAL).warnings == []


@pytest.mark.parametrize(("mode", "who"), [(0o664, "its group"), (0o646, "all users")])
def test_files_that_other_users_can_write_are_refused(tmp_path: Path, mode: int, who: str) -> None:
    """Configuration and plugin directories that others can write are refused, with the remedy."""
    path = write(tmp_path / "c.yaml", MINIMAL)
    path.chmod(mode)
    with pytest.raises(Invalid, match=rf"1:1: can be written by {who}: chmod go-w {path}$"):
        load(path, {})
    plugins = tmp_path / "plug ins"
    plugins.mkdir()
    plugins.chmod(mode | 0o111)
    (message,) = problems(tmp_path, f"plugins: {{directories: ['{plugins}']}}\n" + MINIMAL)
    assert message.startswith("c.yaml:1:25: ")
    assert message.endswith(f"chmod go-w '{plugins}'")


def test_unreadable_files(tmp_path: Path) -> None:
    """A file that is missing or not regular is one message, and a FIFO does not block."""
    for path, words in ((tmp_path / "gone", "No such file"), (tmp_path, "not a regular file")):
        with pytest.raises(Invalid, match=words) as caught:
            load(path, {})
        assert len(caught.value.problems) == 1
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(Invalid, match="not a regular file"):
        load(tmp_path / "fifo", {})


def test_a_missing_plugin_directory_is_a_warning(tmp_path: Path) -> None:
    """A plugin directory that does not exist is a warning at its location."""
    text = "plugins: {directories: [gone]}\n" + MINIMAL
    (warning,) = loaded(tmp_path, text).warnings
    assert str(warning).startswith(f"{tmp_path}/c.yaml:1:25: plugins.directories[0]: ")


def test_find_config() -> None:
    """The argument comes before $RECONCILED_CONFIG, that before systemd's, that before /etc."""
    environ = {"RECONCILED_CONFIG": "/b", "CONFIGURATION_DIRECTORY": "/c:/d"}
    assert find_config("/a", environ) == Path("/a")
    assert find_config(None, environ) == Path("/b")
    assert find_config("x/../y", {}) == Path.cwd() / "y"
    del environ["RECONCILED_CONFIG"]
    assert find_config(None, environ) == Path("/c/reconciled.yaml")
    assert find_config(None, {}) == Path("/etc/reconciled/reconciled.yaml")


SECONDS = st.integers(1, 86_400_000).map(lambda ms: ms / 1000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    drain=SECONDS,
    more=SECONDS,
    cleanup=SECONDS,
    concurrency=st.integers(1, 10**6),
    share=st.integers(0, 100),
    name=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True),
    interrupted=st.sampled_from(["roll-forward", "roll-back", "hold"]),
)
def test_a_valid_configuration_round_trips(  # noqa: PLR0917 - hypothesis hands in by name
    tmp_path: Path,
    drain: float,
    more: float,
    cleanup: float,
    concurrency: int,
    share: int,
    name: str,
    interrupted: str,
) -> None:
    """Every valid value that is written is the value that is loaded."""
    text = f"""
state: /x
stop:
  drain: {format_duration(drain)}
  critical: {format_duration(drain + more)}
  cleanup: {format_duration(cleanup)}
controllers:
  "{name}":
    reconciler: exec
    watch: [{{every: {format_duration(more)}}}]
    concurrency: {concurrency}
    interrupted: {interrupted}
    removals: {{share: {share}%}}
"""
    result = config(tmp_path, text)
    assert result.stop.drain == pytest.approx(drain)
    assert result.stop.critical == pytest.approx(drain + more)
    assert result.stop.cleanup == pytest.approx(cleanup)
    controller = result.controllers[name]
    assert controller.concurrency == concurrency
    assert controller.interrupted == interrupted
    assert controller.removals.share == pytest.approx(share / 100)
    (watch,) = controller.watch
    assert isinstance(watch, EveryWatch)
    assert watch.interval == pytest.approx(more)
