"""The daemon's log in a real journal: queries, readability, and losses."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from container import Container
from installed import Service, wait_until

CATALOG = Path(__file__).resolve().parents[2] / "systemd/reconciled.catalog"
GOLDEN = Path(__file__).with_name("golden") / "bad_stop.txt"
LARGE = 3_000_000
# More than daemon and kernel buffer for a journal that does not read.
FLOOD, WIDTH = 3000, 1000

# A plugin that logs much, which the probe does not.
TALKER = f"""\
import attrs, trio
from pathlib import Path
from reconciled.api import Reconciler, done


@attrs.frozen
class Talk:
    do: str = "large"
    beats: str = ""


class Talker(Reconciler[Talk]):
    async def reconcile(self, request):
        return await getattr(self, request.spec.do)(request)

    async def large(self, request):
        request.log.info("talk.large", parts=[["x" * 4000] * 50] * {LARGE // 200_000})
        return done()

    async def flood(self, request):
        \"\"\"Begins to flood when it is asked to, and notes in a file that the loop turns.\"\"\"
        beats, go = Path(request.spec.beats), Path(request.spec.beats + ".go")
        while not go.exists():
            await trio.sleep(0.01)
        for number in range({FLOOD}):
            request.log.info("talk.flood", number=number, padding="x" * {WIDTH})
            if number % 100 == 0:
                await trio.sleep(0)
        while True:
            beats.write_text(str(trio.current_time()))
            await trio.sleep(0.02)
"""


@pytest.fixture
def talker(service: Service) -> Service:
    """The service with the plugin above as controller ``c``."""
    service.file("plugins/talker.py", TALKER)
    watch = [{"directory": "resources"}]
    service.configure(controllers={"c": {"reconciler": "talker:Talker", "watch": watch}})
    return service


def asked(service: Service, *words: str) -> str:
    """The output of journalctl for this run of the service; *words* are options and matches."""
    run = service.property("InvocationID")
    return service.container.run("journalctl", f"_SYSTEMD_INVOCATION_ID={run}", *words).stdout


def fields_of(service: Service, *words: str) -> list[dict[str, Any]]:
    """Its entries, with all their fields."""
    told = asked(service, "-o", "json", "--all", *words)
    return [json.loads(line) for line in told.splitlines()]


def wait_for_quiet(service: Service) -> None:
    """Wait for the lines that the daemon logs some time after its start."""
    for event in ("daemon.ready", "unit.ok", "shutdown.lock_held"):
        service.wait_for(event)


# -- what can be looked for -----------------------------------------------------------------------


def test_an_operation_can_be_looked_for(service: Service) -> None:
    """The journal finds the lines of an operation by its id, key, kind or priority."""
    service.configure(log={"level": "debug"})
    service.declare("site", apply=["true"])
    service.declare("shop", apply=["false"])
    service.start()
    begun = service.wait_for("operation.began", key="x/site").fields["operation"]
    service.wait_for("reconcile.done", key="x/site")
    service.wait_for("reconcile.failed", key="x/shop")
    told = fields_of(service, f"RECONCILED_OPERATION={begun}")
    assert {entry["RECONCILED_KEY"] for entry in told} == {"x/site"}
    keys = service.container.run("journalctl", "-F", "RECONCILED_KEY").stdout.split()
    assert {"x/site", "x/shop"} <= set(keys)
    bad = fields_of(service, "-p", "warning", "SYSLOG_IDENTIFIER=reconciled")
    assert {entry["PRIORITY"] for entry in bad} <= {"4", "3", "2"}
    assert "reconcile.failed" in {entry["RECONCILED_EVENT"] for entry in bad}
    service.stop()


def test_the_catalog_explains_an_entry(service: Service) -> None:
    """``journalctl -x`` explains an entry with its own fields, and the command to run."""
    service.container.write(
        "/usr/local/lib/systemd/catalog/reconciled.catalog", CATALOG.read_text()
    )
    service.container.run("journalctl", "--update-catalog")
    service.configure()
    service.declare("slow", kind="Probe", do="critical", seconds=60.0, budget="300ms")
    service.start()
    cut = service.wait_for("operation.interrupted", key="c/slow")
    shown = asked(service, "-x", f"RECONCILED_OPERATION={cut.fields['operation']}")
    assert "Subject: An operation was interrupted" in shown
    assert f"reconciled journal show {cut.fields['operation']}" in shown
    assert "RECONCILED_" not in shown.replace("RECONCILED_OPERATION=", "")
    service.stop()


def test_a_traceback_keeps_its_lines(service: Service) -> None:
    """A traceback is one entry: a field of several lines, shown below the message."""
    service.configure(log={"level": "debug"})
    service.declare("bad", kind="Probe", do="crash")
    service.start()
    service.wait_for("plugin.traceback", key="c/bad")
    entry = fields_of(service, "RECONCILED_EVENT=plugin.traceback")[0]
    rows = entry["TRACEBACK"].splitlines()
    assert rows[0] == "Traceback (most recent call last):"
    assert rows[-1] == "ValueError: no such thing"
    shown = asked(service, "-o", "cat", "RECONCILED_EVENT=plugin.traceback")
    assert re.search(r'^  +File ".*probe.py", line \d+, in crash$', shown, re.MULTILINE)
    service.stop()


def test_three_megabytes_are_one_entry(talker: Service) -> None:
    """A record larger than a datagram arrives as one complete entry, with a one-line message."""
    talker.declare("all", kind="Talk")
    talker.start()
    talker.wait_for("talk.large", key="c/all")
    (entry,) = fields_of(talker, "RECONCILED_EVENT=talk.large")
    assert len(entry["RECONCILED_PARTS"]) > LARGE
    assert json.loads(entry["RECONCILED_PARTS"])[-1][-1] == "x" * 4000
    assert len(entry["MESSAGE"]) < 300
    talker.stop()


# -- a journal that stands still ------------------------------------------------------------------


@contextlib.contextmanager
def standing_still(container: Container) -> Iterator[None]:
    """The process of the journal is halted."""
    pid = container.run("systemctl", "show", "-P", "MainPID", "systemd-journald").stdout.strip()
    container.run("kill", "-STOP", pid)
    try:
        yield
    finally:
        container.run("kill", "-CONT", pid)


def test_a_journal_that_stands_still_holds_up_nothing(talker: Service) -> None:
    """The loop does not block; dropped records are counted, and the count is logged in place."""
    beats = "/var/lib/reconciled/beats"
    talker.declare("all", kind="Talk", do="flood", beats=beats)
    talker.start()
    wait_for_quiet(talker)
    with standing_still(talker.container):
        talker.container.write(f"{beats}.go", "")
        file = talker.container.root / beats.lstrip("/")
        wait_until(file.exists, "the end of the flood")
        for _ in range(10):
            seen = file.read_text()
            wait_until(lambda seen=seen: file.read_text() not in ("", seen), "a turn of the loop")
        assert fields_of(talker, "RECONCILED_EVENT=talk.flood") == []
    dropped = int(talker.wait_for("log.dropped").fields["count"])
    told = fields_of(talker, "RECONCILED_EVENT=talk.flood")
    numbers = [int(entry["RECONCILED_NUMBER"]) for entry in told]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) + dropped == FLOOD
    # Where they are missing: right after the last one that arrived.
    events = [entry.event for entry in talker.entries()]
    assert events.index("log.dropped") == len(events) - 1 - events[::-1].index("talk.flood") + 1
    talker.stop()


def test_what_a_journal_missed_to_the_end_is_told(talker: Service) -> None:
    """A daemon that ends while the journal is halted leaves the count, and its stop report."""
    beats = "/var/lib/reconciled/beats"
    talker.declare("all", kind="Talk", do="flood", beats=beats)
    talker.start()
    wait_for_quiet(talker)
    # By process: a stopped unit has no invocation that could be queried.
    of_run = ("-o", "json", "_TRANSPORT=stdout", f"_PID={talker.property('MainPID')}")
    with standing_still(talker.container):
        talker.container.write(f"{beats}.go", "")
        wait_until((talker.container.root / beats.lstrip("/")).exists, "the end of the flood")
        talker.stop()
    wait_until(
        lambda: talker.container.run("journalctl", *of_run).stdout, "a line on standard error"
    )
    told = json.loads(talker.container.run("journalctl", *of_run).stdout)
    assert told["PRIORITY"] == "4"
    dropped = re.fullmatch(r"log.dropped \(count=(\d+)\)", told["MESSAGE"])
    assert dropped
    report = json.loads(talker.container.read("/var/lib/reconciled/last-stop.json"))
    # The report was written before the last lines.
    assert 0 < report["log_lines_dropped"] <= int(dropped[1])


def test_a_journal_that_was_stopped_gets_what_it_missed(own_container: Container) -> None:
    """A restart of the journal and its sockets loses no line of the time between."""
    service = Service(own_container)
    service.clean()
    service.configure()
    service.declare("one", apply=["true"])
    service.start()
    service.wait_for("reconcile.done", key="x/one")
    wait_for_quiet(service)
    units = [f"systemd-journald{each}" for each in (".socket", "-dev-log.socket", ".service")]
    own_container.run("systemctl", "stop", *units, "systemd-journald-audit.socket", check=False)
    states = own_container.run("systemctl", "is-active", *units, check=False).stdout.split()
    assert set(states) == {"inactive"}
    service.declare("two", apply=[service.script("two", "touch $STATE_DIRECTORY/two")])
    wait_until((own_container.root / "var/lib/reconciled/two").exists, "work without a journal")
    own_container.run("systemctl", "start", *units)
    service.wait_for("reconcile.done", key="x/two")
    service.stop()
    assert service.property("Result") == "success"
    service.wait_for("stop.ended")
    assert not service.all("log.dropped")


# -- what a person reads -------------------------------------------------------------------------


def normalised(text: str) -> list[str]:
    """Lines as `journalctl` shows them, with variable parts replaced."""
    for form, instead in (
        (r"^\w{3} +\d+ [\d:]+ \S+ ", ""),  # time and machine
        (r"^ +", "    "),  # as wide as these
        (r"\[\d+\]:", "[PID]:"),
        (r"\bpid([= ])\d+", r"pid\1PID"),
        (r"(program=sleep) \w+=\d+\)", r"\1)"),
        (r"\b01[0-9A-Z]{24}\b", "01OPERATION000000000000000"),
        (r"(duration_s|failures|run)=[\d.]+", r"\1=N"),
        (r"cut off after [\d.a-z]+ by", "cut off after 3s by"),
    ):
        text = re.sub(form, instead, text, flags=re.MULTILINE)
    # Some versions log the resources that a service used.
    return [line for line in text.splitlines() if " Consumed " not in line]


def test_a_bad_stop_can_be_read(service: Service) -> None:
    """One screen of ``journalctl -u`` shows what was cut, interrupted and left, and what to do."""
    service.configure({"drain": "300ms", "critical": "3s", "cleanup": "500ms"})
    hang = "trap '' TERM\ntouch $STATE_DIRECTORY/hangs\nsleep 60 & wait; wait"
    leak = "setsid -f sleep 60\ntouch $STATE_DIRECTORY/leaks\nsleep 60"
    service.declare("database", apply=[service.script("hang", hang)], critical={"budget": "3s"})
    service.declare("mirror", apply=[service.script("leak", leak)])
    service.start()
    for name in ("hangs", "leaks"):
        wait_until((service.container.root / f"var/lib/reconciled/{name}").exists, f"what {name}")
    wait_for_quiet(service)
    run = service.property("InvocationID")
    service.stop(check=False)
    service.container.run("journalctl", "--sync")
    of_run = (f"INVOCATION_ID={run}", "+", f"_SYSTEMD_INVOCATION_ID={run}")
    shown = service.container.run("journalctl", *of_run).stdout
    golden = GOLDEN.read_text().splitlines()
    told = normalised(shown)[-len(golden) :]
    # The order varies: manager, daemon and kernel log concurrently.
    assert sorted(told) == sorted(golden), shown
    assert len(golden) <= 24
    assert max(map(len, golden)) <= 170
