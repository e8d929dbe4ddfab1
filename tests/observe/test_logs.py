"""The log: rendering, folding, redaction, and the logging module."""

from __future__ import annotations

import gc
import json
import logging
import os
import pty
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog
import trio
import trio.testing

from reconciled.core.repeat_filter import Emit, Line, RepeatFilter, Suppress
from reconciled.observe.logs import Logs, configure


@attrs.define(eq=False)
class Log:
    """A log on a file, with clocks that the test advances."""

    path: Path
    logs: Logs
    time: list[float]

    def text(self) -> str:
        return self.path.read_text()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Log]]:
    """Makes logs on files."""
    made: list[tuple[Log, int]] = []

    def make(style: str = "json", level: str = "info") -> Log:
        path = tmp_path / f"log{len(made)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        time = [1000.0]
        logs = configure(
            style,
            level,
            descriptor=descriptor,
            journal=str(tmp_path / "no journal"),
            environment={},
            wall=lambda: 1_700_000_000 + time[0],
            clock=lambda: time[0],
        )
        made.append((Log(path, logs, time), descriptor))
        return made[-1][0]

    yield make
    for log, descriptor in made:
        log.logs.close()
        os.close(descriptor)


class Broken:
    """A value whose repr() raises, as a plugin may log one."""

    def __repr__(self) -> str:
        return str(1 // 0)


def test_a_line_of_json(make: Callable[..., Log]) -> None:
    """Each line is one JSON object: time, level, event, key and run first, then the others."""
    log = make()
    log.logs.log.bind(run=7, key="site/a").info("run.done", outcome="done", duration_s=0.25)
    assert log.text() == (
        '{"time":"2023-11-14T22:30:00.000Z","level":"info","event":"run.done","key":"site/a",'
        '"run":7,"outcome":"done","duration_s":0.25}\n'
    )


def test_a_line_of_text(make: Callable[..., Log]) -> None:
    """Text has the same fields, aligned, and no colour unless the descriptor is a terminal."""
    log = make("text")
    log.logs.log.warning("run.failed", key="site/a", reason="exit 1", next=None, odd='"')
    assert log.text() == (
        "2023-11-14T22:30:00.000Z warning  run.failed               "
        'key=site/a reason="exit 1" next=- odd="\\""\n'
    )


@pytest.mark.parametrize("style", ["json", "text"])
@pytest.mark.parametrize("character", "\n\r\x1b\x9b\u2028\u202e\u2066\x7f\udcff\x00")
def test_control_characters_are_escaped(
    make: Callable[..., Log], style: str, character: str
) -> None:
    """Newlines, escape sequences and direction marks in values and names are escaped."""
    log = make(style)
    evil = f"a{character}[2Jb"
    log.logs.log.info("event.name", value=evil, nested={"x": [evil]}, **{evil: 1})
    text = log.text()
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()
    assert text.isascii()


def test_no_log_call_raises(make: Callable[..., Log]) -> None:
    """For any values the call returns and writes a line that can be parsed."""
    log = make()
    cycle: list[Any] = []
    cycle.append(cycle)
    info = log.logs.log.info
    info("a", value=Broken(), nested=[Broken()], error=ValueError(Broken()))
    info("b", value=cycle, number=float("nan"), big=10**5000, data=b"\xff\x00", path=Path("/x"))
    info("c %s %d", 1, object)
    info("d", event="e", level="f", time="g", self=1, method_name=2)
    info(None)  # type: ignore[arg-type]
    info("e", exc_info=True)
    lines = log.lines()
    assert len(lines) == 6
    assert lines[0]["value"] == "<unprintable Broken: ZeroDivisionError>"
    assert lines[1]["number"] == "nan"
    assert lines[1]["data"] == "\\xff\x00"
    assert lines[2]["event"] == "c %s %d"
    assert lines[3]["level"] == "info"


def test_long_values_are_cut(make: Callable[..., Log]) -> None:
    """A value is cut in its middle, with a marker, and a collection after 64 items."""
    log = make()
    log.logs.log.info("event", text="x" * 100_000, many=list(range(1000)), deep=[[[[[[1]]]]]])
    (line,) = log.lines()
    assert len(line["text"]) < 4200
    assert "95904 characters cut" in line["text"]
    assert line["many"][-1] == "…[936 more]"
    assert line["deep"] == [[[["[[1]]"]]]]


def test_exceptions_are_type_and_message(make: Callable[..., Log]) -> None:
    """An expected error is logged without a traceback; exc_info and level debug add one."""
    log = make()
    try:
        raise KeyError("x")
    except KeyError as exc:
        log.logs.log.warning("a", error=exc)
        log.logs.log.exception("b")
        log.logs.set_level("debug")
        log.logs.log.warning("c", error=exc)
    group = ExceptionGroup("g", [ValueError("one"), ExceptionGroup("h", [OSError("two")])])
    log.logs.set_level("info")
    log.logs.log.error("d", error=group)
    expected, internal, debugged, several = log.lines()
    assert (expected["error_type"], expected["error"]) == ("KeyError", "'x'")
    assert "traceback" not in expected
    assert "test_exceptions_are_type_and_message" in internal["traceback"]
    assert "test_exceptions_are_type_and_message" in debugged["traceback"]
    assert several["error"] == "ValueError: one; OSError: two"


def test_a_traceback_in_text_is_indented(make: Callable[..., Log]) -> None:
    """In text each row of a traceback is indented, so that it cannot be mistaken for a log line."""
    log = make("text")
    try:
        raise KeyError("x\n2023-11-14T22:30:00.000Z info forged")
    except KeyError:
        log.logs.log.exception("b")
    first, *rows = log.text().splitlines()
    assert "KeyError" in first
    assert rows
    assert all(row.startswith("    | ") for row in rows)


def test_set_level_affects_bound_loggers(make: Callable[..., Log]) -> None:
    """A change of the level, up or down, applies to loggers that were bound before."""
    log = make()
    bound = log.logs.log.bind(key="site/a")
    bound.debug("a")
    log.logs.set_level("debug")
    bound.debug("b")
    log.logs.set_level("error")
    bound.warning("c")
    bound.error("d")
    assert [line["event"] for line in log.lines()] == ["b", "d"]
    with pytest.raises(ValueError, match="loud"):
        log.logs.set_level("loud")


def test_each_log_has_its_own_level(make: Callable[..., Log]) -> None:
    """Each Logs object has its own level: there is no global one."""
    one, two = make(), make()
    one.logs.set_level("error")
    two.logs.log.info("seen")
    assert len(two.lines()) == 1


def test_r1_equal_errors_are_counted(make: Callable[..., Log]) -> None:
    """R1: 10,000 equal errors give one line, counted summaries, and one line at recovery."""
    log = make()
    for number in range(10_000):
        log.time[0] = 1000 + number * 0.01
        log.logs.log.error("run.failed", key="site/a", reason="refused", run=number)
    log.logs.report_recovery("site/a")
    log.logs.report_recovery("site/a")
    lines = log.lines()
    assert [line["event"] for line in lines] == ["run.failed"] * 3 + ["fault.recovered"]
    assert "repeated" not in lines[0]
    assert lines[1]["repeated"] == 999
    assert lines[1]["since"] == "2023-11-14T22:30:00.010Z"
    assert lines[-1]["fault"] == "run.failed"
    assert lines[-1]["key"] == "site/a"
    assert sum(line.get("repeated", 0) for line in lines) + 3 == 10_000


def test_r1_another_reason_is_logged_at_once(make: Callable[..., Log]) -> None:
    """R1: another reason is logged at once, after the count of the previous one."""
    log = make()
    for reason in ("refused", "refused", "no space", "no space"):
        log.logs.log.error("run.failed", key="site/a", reason=reason)
    logged = [(line["reason"], line.get("repeated")) for line in log.lines()]
    assert logged == [("refused", None), ("refused", 1), ("no space", None)]


def test_info_lines_that_differ_are_not_folded(make: Callable[..., Log]) -> None:
    """Lines of level info are folded only if they are equal except for run and durations."""
    log = make()
    for number in range(20):
        log.logs.log.info("plugin.loaded", name=f"p{number}")
        log.logs.log.info("run.done", key="site/a", run=number, duration_s=number)
        log.logs.log.info("tasks.tree", task="same")
    events = [line["event"] for line in log.lines()]
    assert [events.count(name) for name in ("plugin.loaded", "run.done", "tasks.tree")] == [
        20,
        1,
        20,
    ]


async def test_due_summaries_are_written_without_a_further_line(
    make: Callable[..., Log],
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - its presence is its effect
) -> None:
    """serve() writes a summary when it is due, without a further line."""
    log = make()
    log.logs.log.error("run.failed", key="site/a", reason="refused")
    log.logs.log.error("run.failed", key="site/a", reason="refused")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.logs.serve)
        log.time[0] += 11
        await trio.sleep(1.5)
        nursery.cancel_scope.cancel(reason="seen")
    assert [line.get("repeated") for line in log.lines()] == [None, 1]


def test_faults_without_a_subject_are_not_folded(make: Callable[..., Log]) -> None:
    """Warnings that have only a reason are distinct faults, not changes of one fault."""
    log = make()
    for number in range(40):
        log.logs.log.warning("config.not_built", reason=f"name {number % 20}")
    assert [line["reason"] for line in log.lines()] == [f"name {n}" for n in range(20)]


def test_r1_a_source_recovers(make: Callable[..., Log]) -> None:
    """R1: the fault of a source is folded and its recovery logged, as for a key."""
    log = make()
    source = log.logs.log.bind(controller="site", source="directory x")
    for _ in range(3):
        source.warning("source.unavailable", reason="missing")
    log.logs.report_recovery("site: directory x")
    logged = [(line["event"], line.get("repeated")) for line in log.lines()]
    assert logged == [("source.unavailable", None), ("fault.recovered", 2)]
    assert log.lines()[-1]["source"] == "directory x"


def test_close_writes_the_summaries(make: Callable[..., Log]) -> None:
    """close() writes the counts of folded lines."""
    log = make()
    for _ in range(5):
        log.logs.log.error("run.failed", key="site/a", reason="refused")
    log.logs.close()
    assert log.lines()[-1]["repeated"] == 4


def test_forget_drops_the_state_of_a_key(make: Callable[..., Log]) -> None:
    """After forget() the next line of the key counts as its first, and no recovery is logged."""
    log = make()
    log.logs.log.error("run.failed", key="site/a", reason="refused")
    log.logs.forget("site/a")
    log.logs.report_recovery("site/a")
    log.logs.log.error("run.failed", key="site/a", reason="refused")
    assert [line["event"] for line in log.lines()] == ["run.failed", "run.failed"]


def test_secrets_are_not_written(make: Callable[..., Log]) -> None:
    """Invariant 13: secrets are redacted by name, by value, in tracebacks, nested data and cuts."""
    log = make()
    secret = "hunter2-hunter2"
    log.logs.redactor.register(secret)
    try:
        raise ValueError(f"login with {secret}")
    except ValueError:
        log.logs.log.exception(
            "a",
            api_key="k-123",
            text=f"x {secret} y",
            headers={"Authorization": "Bearer abcdef", "list": [secret]},
            url="https://user:pa55@host/x",
            long="x" * 2040 + secret + "x" * 8000,
        )
    text = log.text()
    for part in (secret, secret[:8], "k-123", "abcdef", "pa55"):
        assert part not in text
    assert text.count("[redacted]") >= 6


def test_records_of_the_logging_module_are_captured(make: Callable[..., Log]) -> None:
    """Records of libraries, from warning on, become log.stdlib lines; close() undoes it."""
    log = make()
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    log.logs.capture_stdlib()
    logging.getLogger("httpx").info("GET /")
    logging.getLogger("httpx").warning("slow: %s", "x")
    logging.getLogger("odd").error("%d", "no number")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    structlog.get_logger().info("from.structlog", field=1)
    log.logs.close()
    assert (list(root.handlers), root.level) == before
    lines = log.lines()
    assert lines[0] | {"time": ""} == {
        "time": "",
        "level": "warning",
        "event": "log.stdlib",
        "logger": "httpx",
        "message": "slow: x",
    }
    assert "arguments do not fit" in lines[1]["message"]
    assert "old" in lines[2]["message"]
    assert lines[3]["event"] == "from.structlog"


def test_info_records_of_libraries_are_captured_at_debug(make: Callable[..., Log]) -> None:
    """At level debug the records of libraries are captured from info on."""
    log = make()
    log.logs.capture_stdlib()
    log.logs.set_level("debug")
    logging.getLogger("httpx").info("GET /")
    logging.getLogger("httpx").debug("bytes")
    assert [line["message"] for line in log.lines()] == ["GET /"]


def test_a_finalizer_that_logs_does_not_hang(make: Callable[..., Log]) -> None:
    """A line logged by a finalizer during another line of the same thread is written."""
    log = make()

    class Late:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            log.logs.log.warning("finalizer.ran")

    class Collects:
        def __repr__(self) -> str:
            gc.collect()
            return "done"

    Late()
    log.logs.log.warning("outer", value=Collects())
    assert {line["event"] for line in log.lines()} == {"outer", "finalizer.ran"}


def test_a_line_logged_during_folding_is_not_folded(make: Callable[..., Log]) -> None:
    """A line logged while its own thread is folding another one is written unfolded."""
    log = make()

    class Interrupted(RepeatFilter):
        def admit(self, line: Line, now: float) -> Emit | Suppress:
            if line.event == "outer":
                log.logs.log.warning("inner")
            assert line.event != "inner"
            return super().admit(line, now)

    log.logs._folder = Interrupted()
    log.logs.log.warning("outer")
    assert [line["event"] for line in log.lines()] == ["inner", "outer"]


def test_without_a_journal_the_format_falls_back_to_json(make: Callable[..., Log]) -> None:
    """Format journal without a journal gives JSON and one warning."""
    log = make("journal")
    log.logs.log.info("a")
    assert [line["event"] for line in log.lines()] == ["log.journal_missing", "a"]


def test_an_unknown_format_is_refused() -> None:
    """An unknown format is an error that names the known ones."""
    with pytest.raises(ValueError, match="auto, text, json or journal"):
        configure("xml", environment={})


def test_lines_of_a_reload_are_not_folded(make: Callable[..., Log]) -> None:
    """Each of two failed reloads logs all of its problems, also if they are equal."""
    log = make()
    for _ in range(2):
        log.logs.log.error("config.invalid", at="a.yaml:1:1", reason="unknown key")
        log.logs.log.error("reload.failed", problems=1)
    assert [line["event"] for line in log.lines()] == ["config.invalid", "reload.failed"] * 2


def test_log_from_thread_is_not_folded(make: Callable[..., Log]) -> None:
    """The last resort's lines are written although equal ones are folded."""
    log = make()
    for _ in range(2):
        assert log.logs.log_from_thread("critical", "loop.hung", seconds=5)
    assert len(log.lines()) == 2


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
)
def test_colour_is_used_on_terminals(environment: dict[str, str], *, coloured: bool) -> None:
    """On a terminal auto is text, in colour unless NO_COLOR or TERM=dumb is set."""
    master, slave = pty.openpty()
    logs = configure(descriptor=slave, environment=environment)
    logs.log.info("event.name", value=1)
    got = os.read(master, 1000).decode()
    logs.close()
    os.close(slave)
    os.close(master)
    assert "event.name" in got
    assert "{" not in got
    assert ("\x1b[" in got) is coloured
