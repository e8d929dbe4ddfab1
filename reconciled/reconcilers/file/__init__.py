"""The ``file`` reconciler."""

from reconciled.reconcilers.file.reconciler import File, FileReconciler

__all__ = ["File", "FileReconciler"]
