"""Out of memory: a program fails and the service continues; the daemon itself is restarted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from container import Container, Missing
from hybrid_container import booted_with_limits
from installed import STATE, STOP, Service, install, wait_until

pytestmark = pytest.mark.optional

LIMITS = "[Service]\nMemoryMax=150M\nMemorySwapMax=0\nRestartSec=100ms\n"
EATS = "exec python3 -c 'all = []\nwhile True: all.append(bytearray(1 << 20))'"
HOG = '''
import attrs
from reconciled.api import Reconciler, Request, Result, done

@attrs.frozen
class Hog:
    pass

class HogReconciler(Reconciler[Hog]):
    """Allocates all memory, inside the daemon."""

    async def reconcile(self, request: Request[Hog]) -> Result:
        eaten = []
        while True:
            eaten.append(bytearray(1 << 20))
        return done()
'''


@pytest.fixture(scope="module")
def memory_box(
    container: Container, tmp_path_factory: pytest.TempPathFactory, binds: list[str]
) -> Iterator[Container]:
    """A manager that can limit memory: the usual one where the machine permits."""
    if "memory" in container.run("cat", "/sys/fs/cgroup/cgroup.controllers").stdout.split():
        yield container
        return
    try:
        with booted_with_limits(tmp_path_factory.mktemp("hybrid"), *binds) as made:
            install(made)
            yield made
    except Missing as missing:
        pytest.skip(f"no manager here can limit memory: {missing}")


@pytest.fixture
def limited(memory_box: Container) -> Iterator[Service]:
    """The service in it, with 150 MB."""
    made = Service(memory_box)
    made.clean()
    made.configure({**STOP, "critical": "60s"})
    made.drop_in(LIMITS)
    yield made
    made.clean()


def test_a_program_out_of_memory_is_one_failed_operation(limited: Service) -> None:
    """A program is killed, recovered, retried, and held at the cap; the daemon does other work."""
    quick = {"initial": "100ms", "max": "200ms"}
    exec_ = {"reconciler": "exec", "watch": [{"directory": "resources"}], "retry": quick}
    limited.configure(controllers={"x": exec_})
    limited.declare("hungry", apply=[limited.script("eat", f"echo >>$STATE_DIRECTORY/ate; {EATS}")])
    limited.start()
    main = limited.property("MainPID")
    limited.wait_for("operation.held", key="x/hungry")
    tries = (limited.container.root / STATE.lstrip("/") / "ate").read_text().count("\n")
    assert tries == 1 + 3  # max_recoveries
    limited.declare("modest", apply=["true"])
    limited.wait_for("reconcile.done", key="x/modest")
    assert limited.show("ActiveState", "NRestarts", "MainPID") == {
        "ActiveState": "active",
        "NRestarts": "0",
        "MainPID": main,
    }


def test_a_daemon_out_of_memory_leaves_its_critical_program_alone(limited: Service) -> None:
    """If the daemon is killed, a critical program completes once, and the restart waits for it."""
    limited.file("plugins/hog.py", HOG)
    watch = [{"directory": "resources"}]
    controllers = {
        "x": {"reconciler": "exec", "watch": watch},
        "hog": {"reconciler": "hog:HogReconciler", "watch": watch},
    }
    limited.configure({**STOP, "critical": "60s"}, controllers=controllers)
    here = "cd $STATE_DIRECTORY; echo >>runs; touch running"
    work = f"{here}; until [ -e go ]; do sleep 0.02; done; touch done"
    limited.declare("site", apply=[limited.script("apply", work)], critical={"budget": "30s"})
    limited.start()
    state = limited.container.root / STATE.lstrip("/")
    wait_until((state / "running").exists, "the program")
    limited.declare("eats", kind="Hog")
    wait_until(lambda: limited.property("SubState") == "stop-post", "the reaper")
    assert limited.property("Result") in ("signal", "oom-kill")
    assert limited.property("ExecMainStatus") == "9"
    limited.withdraw("eats")
    (state / "go").touch()
    limited.wait_for("recovery.done", key="x/site")
    assert (state / "runs").read_text().count("\n") == 1
    assert (state / "done").exists()
