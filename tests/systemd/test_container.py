"""The container itself, which the other tests rely on."""

from __future__ import annotations

from installed import Service


def test_the_service_runs_in_the_box_as_its_user(service: Service) -> None:
    """The shipped unit runs the program of the checkout, in its sandbox, as user reconciled."""
    service.configure()
    service.declare("who", apply=[service.script("who", "id -un > $STATE_DIRECTORY/who")])
    service.drop_in("[Service]\nType=exec\n")
    service.start()
    service.wait_for("reconcile.done", key="x/who")
    assert service.container.read("/var/lib/reconciled/who") == "reconciled\n"
    service.stop()
    assert service.show("Result", "ActiveState") == {"Result": "success", "ActiveState": "inactive"}
