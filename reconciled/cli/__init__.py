"""The command line: one thin module for each verb, imported when the verb is used."""

from reconciled.cli.main import main

__all__ = ["main"]
