"""The ``exec`` reconciler."""

from reconciled.reconcilers.exec.reconciler import Exec, ExecReconciler

__all__ = ["Exec", "ExecReconciler"]
