"""Whether an operation can be undone, as its controller's reconciler says.

It needs the configuration and loads one plugin; where that fails the answer is why it is not
known, and never a guess.
"""

from __future__ import annotations

import attrs

from reconciled.config.model import Config
from reconciled.core.errors import Invalid
from reconciled.core.resources import controller_of
from reconciled.journal.operation_record import OperationRecord
from reconciled.runtime.controllers.loading import LoadedController, prepare
from reconciled.runtime.operations.pinned import pinned_manifest
from reconciled.runtime.plugin_errors import text_of


@attrs.frozen
class UndoCheck:
    """Asks reconcilers. invalid says why there is no configuration."""

    config: Config | None
    invalid: str = ""

    def refusal_reason(self, record: OperationRecord) -> str:
        """Why *record* cannot be undone, as a sentence; empty: it can. Runs plugin code."""
        if record.undoes:
            return f"it undoes {record.undoes}, and cannot be undone itself"
        if self.config is None:
            return (
                "whether its reconciler can undo it is not known, since the configuration is"
                f" invalid: {self.invalid}"
            )
        name = controller_of(record.key)
        controller = self.config.controllers.get(name)
        if controller is None:
            return f"nothing can undo it: controller {name} is not configured"
        prepared = prepare(attrs.evolve(self.config, controllers={name: controller}))
        if prepared.ready:
            return _ask_reconciler(prepared.ready[0], record)
        reasons = [each.reason for each in prepared.stalled]
        reasons += [str(problem) for problem in prepared.problems]
        return f"nothing can undo it: controller {name} stalls: {'; '.join(reasons)}"


def _ask_reconciler(ready: LoadedController, record: OperationRecord) -> str:
    kind, controller = ready.plugin.kind, ready.config
    if kind != record.pinned["kind"]:
        return f"nothing can undo it: controller {controller.name} takes {kind} now"
    try:
        if ready.reconciler.can_undo(ready.plugin.spec_of(pinned_manifest(record))):
            return ""
    except Invalid as invalid:
        return f"its pinned spec does not fit any more: {invalid}"
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - plugin code
        return f"can_undo() failed: {text_of(error)}"
    return f"nothing can undo it: {controller.reconciler} has no way to, with this spec"
