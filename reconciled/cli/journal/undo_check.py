"""Whether the reconciler of an operation's controller can undo it.

The check needs the configuration and loads one plugin. If that fails, the result is the reason why
the answer is not known, never a guess.
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
    """Asks can_undo() of reconcilers. invalid: why there is no configuration."""

    config: Config | None
    invalid: str = ""

    def refusal_reason(self, record: OperationRecord) -> str:
        """Why *record* cannot be undone, as a sentence; empty: it can. Runs plugin code."""
        if record.undoes:
            return f"it undoes {record.undoes}; an undo cannot be undone itself"
        if self.config is None:
            return (
                "its reconciler cannot be asked, since the configuration is invalid:"
                f" {self.invalid}"
            )
        name = controller_of(record.key)
        controller = self.config.controllers.get(name)
        if controller is None:
            return f"controller {name} is not configured"
        prepared = prepare(attrs.evolve(self.config, controllers={name: controller}))
        if prepared.ready:
            return _ask_reconciler(prepared.ready[0], record)
        reasons = [each.reason for each in prepared.stalled]
        reasons += [str(problem) for problem in prepared.problems]
        return f"controller {name} stalls: {'; '.join(reasons)}"


def _ask_reconciler(ready: LoadedController, record: OperationRecord) -> str:
    kind, controller = ready.plugin.kind, ready.config
    if kind != record.pinned["kind"]:
        return f"controller {controller.name} takes kind {kind} now, not {record.pinned['kind']}"
    try:
        if ready.reconciler.can_undo(ready.plugin.spec_of(pinned_manifest(record))):
            return ""
    except Invalid as invalid:
        return f"its pinned spec is not valid any more: {invalid}"
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - plugin code
        return f"can_undo() failed: {text_of(error)}"
    return f"reconciler {controller.reconciler} cannot undo this spec"
