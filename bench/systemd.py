"""The service under a real systemd, in a container of its own: what an administrator waits for.

Run as root: ``python bench/systemd.py``. ``systemctl start`` until it returns, with 100 manifests;
``systemctl stop`` while nothing runs, the reaper's pass included; and ``systemctl stop`` while a
critical program needs five more seconds. Beside it the least that is a service: a few lines of the
same Python in the same sandbox, that say READY, and wait for SIGTERM and their child. Rounds
alternate.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/systemd"))

import program
from container import Missing, booted, check_requirements
from installed import ETC, STATE, UNITS, Service, install, wait_until
from table import heading, row

KEYS = 100
ROUNDS = 9
# Says that it has begun, waits for the file of the stop, and then needs so long.
CHILD = ': >"$2"; while [ ! -e "$1" ]; do sleep 0.01; done; exec sleep 5'
STOPPING, BEGUN = f"{ETC}/stopping", f"{STATE}/begun"
WORDS = ["/bin/sh", "-c", CHILD, "sh", STOPPING, BEGUN]
FLOOR = """\
import os, signal, socket, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
child = subprocess.Popen(sys.argv[1:]) if sys.argv[1:] else None
address = os.environ["NOTIFY_SOCKET"].replace("@", "\\0")
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1", address)
signal.sigwait([signal.SIGTERM])
child and child.wait()
"""
FLOOR_UNIT = f"""\
[Service]
ExecStart=
ExecStart=/opt/reconciled/bin/python3 {ETC}/floor.py
ExecStopPost=
"""

Times = tuple[float, float, float]


def timed(service: Service, verb: str) -> float:
    """Seconds that ``systemctl VERB`` takes."""
    began = time.perf_counter()
    service.systemctl(verb, service.unit)
    return time.perf_counter() - began


def stopped_at_work(service: Service) -> float:
    """Seconds of a stop that comes when the child, which has begun, needs five more."""
    begun = service.container.root / BEGUN.lstrip("/")
    wait_until(begun.exists, "the child's begin")
    begun.unlink()
    service.container.write(STOPPING, "")
    took = timed(service, "stop")
    (service.container.root / STOPPING.lstrip("/")).unlink()
    return took


def ours(service: Service) -> Times:
    """Start, idle stop, stop at work."""
    started, stopped = timed(service, "start"), timed(service, "stop")
    service.declare("long", apply=WORDS, critical={"budget": "20s"})
    service.start()
    busy = stopped_at_work(service)
    service.withdraw("long")
    service.container.run("rm", "-rf", STATE)
    return started, stopped, busy


def floor(service: Service) -> Times:
    """The same of the least that is a service."""
    service.drop_in(FLOOR_UNIT)
    started, stopped = timed(service, "start"), timed(service, "stop")
    words = " ".join(shlex.quote(word.replace("$", "$$")) for word in WORDS)
    service.drop_in(FLOOR_UNIT.replace("floor.py", f"floor.py {words}"))
    service.start()
    return started, stopped, stopped_at_work(service)


def prepare(service: Service) -> None:
    """A configuration with as many manifests of nothing to do as are measured."""
    service.clean()
    service.configure({"drain": "20s", "critical": "60s", "cleanup": "5s"})
    manifest = "---\nkind: Probe\nmetadata: {{name: key-{number}}}\nspec: {{}}\n"
    texts = (manifest.format(number=number) for number in range(KEYS))
    service.file("resources/all.yaml", "".join(texts))
    service.file("floor.py", FLOOR)


def measured() -> list[tuple[Times, Times]]:
    """Rounds of both, in turn. Raises Missing."""
    check_requirements()
    with tempfile.TemporaryDirectory() as place, booted(Path(place), *program.binds()) as container:
        install(container)
        bare = "reconciled-floor.service"
        container.write(f"/etc/systemd/system/{bare}", (UNITS / "reconciled.service").read_text())
        service, beside = Service(container), Service(container, bare)
        prepare(service)
        return [(ours(service), floor(beside)) for _ in range(ROUNDS)]


def main() -> None:
    """Print every row; where no container can be made, why."""
    try:
        rounds = measured()
    except Missing as missing:
        print(f"not measured: {missing}")
        return
    heading()
    for part, name, target in (
        (0, "systemctl start, 100 new manifests", "<= 1000 ms"),
        (1, "systemctl stop while idle", "<= 300 ms"),
        (2, "systemctl stop, 5 s of critical work", "<= 5500 ms"),
    ):
        service = statistics.median(mine[part] for mine, _ in rounds)
        least = statistics.median(bare[part] for _, bare in rounds)
        row(name, service * 1000, least * 1000, "ms", target)


if __name__ == "__main__":
    main()
