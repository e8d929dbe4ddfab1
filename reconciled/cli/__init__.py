"""The command line: one thin module a verb, imported when it is asked for."""

from reconciled.cli.main import main

__all__ = ["main"]
