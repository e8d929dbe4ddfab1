"""The parser of the command line, and the way from a verb to its module.

Nothing heavy is imported here: ``--help`` and, for a daemon, the instant at which signals are
taken seriously both depend on it.
"""

from __future__ import annotations

import sys

from reconciled.core.exit_codes import BROKEN_PIPE, FAILED, INTERNAL, INVALID, NOT_BUILT, USAGE

TYPE_CHECKING = False  # typing itself takes 4 ms
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


# Verb, its help, and the module that does it; None: the verb is not built yet.
VERBS = {
    "run": ("be the daemon, in the foreground", "run"),
    "check": ("grade the configuration and the manifests", "check"),
    "plan": ("show what would be done, without effects", "plan"),
    "budget": ("show how long a stop may take", "budget"),
    "journal": ("list, show and settle operations", "journal.command"),
    "allow": ("permit the removals of a controller that are held", "allow"),
    "reload": ("have the daemon read its configuration again", "reload"),
    "stop": ("begin a stop of the daemon", "stop"),
    "reap": ("end what a dead daemon left running", "reap"),
    "step": ("note a step of the operation that runs the calling program", "step"),
}
UNBUILT_VERBS = {
    "status": "show the state of the running daemon",
    "get": "list resources",
    "describe": "tell all about one resource",
    "events": "show events",
    "queue": "show waiting and delayed keys",
    "tasks": "show the task tree (until then: SIGUSR2 logs it)",
    "reconcile": "reconcile a key now",
    "suspend": "stop reconciling a key",
    "resume": "take up a suspended key",
    "schema": "print JSON Schema",
    "plugins": "list installed reconcilers",
    "new": "make a new plugin",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line *arguments*; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["step"] and len(given) == 2 and not given[1].startswith("-"):  # noqa: PLR2004 - verb and name
        # Programs call it between their effects: without argparse it takes half the time.
        from reconciled.cli import step

        return step.record_step(given[1])
    try:
        parsed = _parsed(given)
    except SystemExit as stop:
        # Wrong usage of the daemon counts as configuration: a unit must not restart on it.
        if stop.code == USAGE and _verb_of(given) == "run":
            raise SystemExit(INVALID) from stop
        raise
    if parsed.verb in UNBUILT_VERBS:
        told = f"reconciled {parsed.verb}: not built yet in this version"
        sys.stderr.write(f"{told} ({UNBUILT_VERBS[parsed.verb]})\n")
        return NOT_BUILT
    import importlib

    module = importlib.import_module(f"reconciled.cli.{VERBS[parsed.verb][1]}")
    try:
        code = int(module.execute(parsed))
        if sys.stdout is not None:
            # Here, where it can still be said: at its end the interpreter would only curse.
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has left, as in ``| head``.
        sys.stdout = None
        return BROKEN_PIPE
    except OSError as error:
        # A full disk, a directory that may not be read: nobody needs a traceback for these.
        sys.stdout = None
        if sys.stderr is not None:
            sys.stderr.write(f"reconciled {parsed.verb}: {error}\n")
        return FAILED if parsed.verb == "run" else INTERNAL


def _verb_of(given: list[str]) -> str:
    """The verb of arguments that could not be parsed: the first that is no option's value."""
    words = iter(given)
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return ""


def _parsed(given: list[str]) -> argparse.Namespace:
    """The arguments. Those of a verb that is not built yet are taken whatever they are."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(given)
    if unknown and parsed.verb not in UNBUILT_VERBS:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed


def _parser() -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(
        prog="reconciled",
        description="Keeps declared things true, and never leaves one half-done.",
    )
    parser.add_argument("--version", action=_version_action(), nargs=0, help="print the version")
    parser.add_argument("--config", metavar="FILE", help="the configuration")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    added = {name: verbs.add_parser(name, help=text) for name, (text, _) in VERBS.items()}
    added["run"].add_argument(
        "--once", action="store_true", help="each key once, then stop; exit 4: a key is not done"
    )
    added["run"].add_argument(
        "--strict", action="store_true", help="refuse a stop budget that does not fit the unit"
    )
    added["check"].add_argument(
        "--strict", action="store_true", help="warnings count as problems too"
    )
    for name in ("check", "budget"):
        added[name].add_argument(
            "--unit",
            metavar="NAME",
            help="of the service (the configuration's own, where it is loaded)",
        )
    added["plan"].add_argument("keys", nargs="*", metavar="KEY", help="only these")
    for name in ("check", "plan", "budget"):
        added[name].add_argument("--json", action="store_true", help="for programs")
    added["stop"].add_argument(
        "--now", action="store_true", help="one stage on, where a stop is under way"
    )
    added["allow"].add_argument("controller", metavar="CONTROLLER")
    added["reap"].add_argument(
        "--wait", default="10m", metavar="TIME", help="for a critical program, at most (10m)"
    )
    added["reap"].add_argument(
        "--term", default="30s", metavar="TIME", help="from SIGTERM to SIGKILL (30s)"
    )
    added["reap"].add_argument("--state", metavar="DIRECTORY", help="else $STATE_DIRECTORY")
    added["step"].add_argument("name", metavar="NAME")
    _add_journal(added["journal"])
    for name, text in UNBUILT_VERBS.items():
        verb = verbs.add_parser(name, help=f"{text} (not built yet)")
        verb.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_journal(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="operations: open, held and past")
    listing.add_argument(
        "--limit", type=int, default=20, metavar="N", help="of those that are over, at most (20)"
    )
    showing = actions.add_parser("show", help="all about one operation")
    showing.add_argument("id", metavar="ID", help="or the beginning of one")
    resolving = actions.add_parser("resolve", help="settle an operation that is held")
    resolving.add_argument("id", metavar="ID", nargs="?", help="or the beginning of one")
    resolving.add_argument(
        "--all", action="store_true", help="all that a damaged store has left in doubt"
    )
    decision = resolving.add_mutually_exclusive_group(required=True)
    for name, text in {
        "complete": "it is done: note that, and run nothing",
        "forward": "go on in the same operation",
        "back": "undo what it did",
        "abandon": "close it without a claim",
    }.items():
        decision.add_argument(
            f"--{name}", dest="decision", action="store_const", const=name, help=text
        )
    resolving.add_argument("--why", required=True, metavar="TEXT", help="for the record")
    for action in (listing, showing, resolving):
        action.add_argument("--state", metavar="DIRECTORY", help="else as configured")
    for action in (listing, showing):
        action.add_argument("--json", action="store_true", help="for programs")


def _version_action() -> type[argparse.Action]:
    import argparse

    class Version(argparse.Action):
        """Reads the version only when it is asked for: the look-up takes 10 ms."""

        def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
            from importlib.metadata import version

            sys.stdout.write(f"reconciled {version('reconciled')}\n")
            parser.exit()

    return Version
