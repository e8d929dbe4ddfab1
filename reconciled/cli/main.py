"""Parses the command line and runs the module of the verb.

Nothing heavy is imported here: ``--help`` and, in a daemon, the installation of the signal
handlers wait for these imports.
"""

from __future__ import annotations

import sys

from reconciled.core.exit_codes import BROKEN_PIPE, FAILED, INTERNAL, INVALID, NOT_BUILT, USAGE

TYPE_CHECKING = False  # typing itself takes 4 ms
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence


# Verb, its help, and its module.
VERBS = {
    "run": ("run the daemon in the foreground", "run"),
    "check": ("check the configuration, the manifests and the unit", "check"),
    "plan": ("show what a run would change, without changing anything", "plan"),
    "budget": ("show how long a stop can take, and whether the unit allows it", "budget"),
    "journal": ("list, show and resolve operations", "journal.command"),
    "allow": ("approve the held removals of a controller", "allow"),
    "reload": ("make the running daemon read its configuration again", "reload"),
    "stop": ("begin a stop of the running daemon", "stop"),
    "reap": ("end the programs that an ended daemon left running", "reap"),
    "step": ("record a step of the operation that runs the calling program", "step"),
}
UNBUILT_VERBS = {
    "status": "show the state of the running daemon",
    "get": "list resources",
    "describe": "show everything about one resource",
    "events": "show events",
    "queue": "show waiting and delayed keys",
    "tasks": "show the task tree; kill -USR2 logs it",
    "reconcile": "reconcile a key now",
    "suspend": "suspend reconciling of a key",
    "resume": "resume reconciling of a key",
    "schema": "print the JSON Schema",
    "plugins": "list installed reconcilers",
    "new": "create a new plugin",
}
# What ``VERB --help`` adds: details, and exit codes.
_DETAILS = {
    "run": (
        "Reconcile until SIGTERM, SIGINT or `reconciled stop`, then stop in stages.",
        (
            "0 clean stop; 1 could not start, or a fault of the daemon; 3 something critical was"
            " cut; 4 with --once: a key is not done; 70 the event loop hung; 75 another daemon"
            " holds the state directory; 78 the configuration is invalid"
        ),
    ),
    "check": (
        "Report all problems at once, each with file, line, column and what to write instead.",
        "0 valid; 78 invalid",
    ),
    "plan": (
        "This needs no running daemon and takes no lock.",
        (
            "0 no changes; 1 there are changes; 70 a key is unknown or could not be planned;"
            " 78 the configuration is invalid"
        ),
    ),
    "budget": (
        (
            "Compare the stages of a stop, the declared budgets and the measured durations with the"
            " limit of the unit."
        ),
        "0 it fits; 1 it does not fit; 78 the configuration is invalid",
    ),
    "journal": ("This works whether or not the daemon is running.", ""),
    "allow": (
        "Approve exactly the removals that are held now, once.",
        "0 approved; 4 nothing is held, or there is no such controller",
    ),
    "reload": (
        "Return when the new configuration is in force. If it is invalid, nothing changes.",
        "0 in force; 1 refused, a stop is in progress; 69 no daemon answers; 78 invalid",
    ),
    "stop": (
        "Return when the stop has begun, not when it has ended.",
        "0 it has begun; 1 refused; 69 no daemon answers",
    ),
    "reap": (
        (
            "The unit runs this in ExecStopPost=. Wait for critical programs within their own"
            " budgets, and end all others."
        ),
        (
            "0 nothing is left; 3 something had to be killed; 75 a daemon is running; 78 the state"
            " directory cannot be used"
        ),
    ),
    "step": (
        "Call this from a program inside an operation, after NAME is done. It needs no daemon.",
        (
            "0 recorded durably; 1 not recorded, stop; 2 wrong usage; 3 another attempt is the"
            " current one, stop without effects"
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line *arguments* and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["step"] and len(given) == 2 and not given[1].startswith("-"):  # noqa: PLR2004 - verb and name
        # Programs call it between their effects; without argparse it takes half the time.
        from reconciled.cli import step

        return step.record_step(given[1])
    try:
        parsed = _parsed(given)
    except SystemExit as stop:
        # Wrong usage of ``run`` is an invalid configuration: a unit must not restart on it.
        if stop.code == USAGE and _verb_of(given) == "run":
            raise SystemExit(INVALID) from stop
        raise
    if parsed.verb in UNBUILT_VERBS:
        refusal = f"reconciled {parsed.verb}: not built yet in this version"
        sys.stderr.write(f"{refusal} ({UNBUILT_VERBS[parsed.verb]})\n")
        return NOT_BUILT
    import importlib

    module = importlib.import_module(f"reconciled.cli.{VERBS[parsed.verb][1]}")
    try:
        code = int(module.execute(parsed))
        if sys.stdout is not None:
            # Here an error can still be reported; at exit the interpreter would print a traceback.
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the output has closed it, as in ``| head``.
        sys.stdout = None
        return BROKEN_PIPE
    except OSError as error:
        # A full disk, an unreadable directory: one line, without a traceback.
        sys.stdout = None
        if sys.stderr is not None:
            sys.stderr.write(f"reconciled {parsed.verb}: {error}\n")
        return FAILED if parsed.verb == "run" else INTERNAL


def _verb_of(given: list[str]) -> str:
    """The verb of arguments that could not be parsed: the first word that is not an option."""
    words = iter(given)
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return ""


def _parsed(given: list[str]) -> argparse.Namespace:
    """The parsed arguments. A verb that is not built yet accepts any."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(given)
    if unknown and parsed.verb not in UNBUILT_VERBS:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed


def _parser() -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(
        prog="reconciled",
        description="Make a host match its declared state, and recover interrupted operations.",
        epilog="reconciled VERB --help describes a verb, its options and its exit codes.",
    )
    parser.add_argument(
        "--version", action=_version_action(), nargs=0, help="print the version and exit"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="configuration file (default: $RECONCILED_CONFIG, else reconciled.yaml in"
        " $CONFIGURATION_DIRECTORY, else /etc/reconciled/reconciled.yaml)",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    added = {
        name: verbs.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. {_DETAILS[name][0]}",
            epilog=_DETAILS[name][1] and f"Exit codes: {_DETAILS[name][1]}.",
        )
        for name, (text, _) in VERBS.items()
    }
    _add_options(added)
    _add_journal(added["journal"])
    for name, text in UNBUILT_VERBS.items():
        verb = verbs.add_parser(name, help=f"{text} (not built yet)")
        verb.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_options(added: Mapping[str, argparse.ArgumentParser]) -> None:
    """The options of all verbs but ``journal``."""
    added["run"].add_argument(
        "--once",
        action="store_true",
        help="run each declared key once, then stop; exit with 4 if a key is not done",
    )
    added["run"].add_argument(
        "--strict", action="store_true", help="refuse to start if the stop budget exceeds the unit"
    )
    added["check"].add_argument("--strict", action="store_true", help="treat warnings as problems")
    for name in ("check", "budget"):
        added[name].add_argument(
            "--unit",
            metavar="NAME",
            help="systemd unit to compare with (default: the one that runs with this"
            " configuration, if it is loaded)",
        )
    added["plan"].add_argument(
        "keys", nargs="*", metavar="KEY", help="plan these keys only (default: all)"
    )
    for name in ("check", "plan", "budget"):
        added[name].add_argument("--json", action="store_true", help="print JSON")
    added["stop"].add_argument(
        "--now",
        action="store_true",
        help="if a stop is in progress, move it on by one stage",
    )
    added["allow"].add_argument(
        "controller", metavar="CONTROLLER", help="controller whose removals are held"
    )
    added["reap"].add_argument(
        "--wait",
        default="10m",
        metavar="TIME",
        help="longest wait for a critical program (default: 10m)",
    )
    added["reap"].add_argument(
        "--term", default="30s", metavar="TIME", help="time from SIGTERM to SIGKILL (default: 30s)"
    )
    added["reap"].add_argument(
        "--state",
        metavar="DIRECTORY",
        help="state directory (default: as configured, else $STATE_DIRECTORY)",
    )
    added["step"].add_argument("name", metavar="NAME", help="name of the step that is done")


def _add_journal(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    texts = {
        "list": ("list operations: open, held and past", "0; 70 the store cannot be read"),
        "show": (
            "show everything about one operation",
            "0; 4 no such operation; 70 the store cannot be read",
        ),
        "resolve": (
            "decide what becomes of a held operation",
            (
                "0 the decision is durable; 1 not held, or nothing can undo it; 4 no such"
                " operation; 75 the daemon does not answer"
            ),
        ),
    }
    listing, showing, resolving = (
        actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"Exit codes: {codes}.",
        )
        for name, (text, codes) in texts.items()
    )
    listing.add_argument(
        "--limit",
        type=int,
        default=20,
        metavar="N",
        help="show at most N past operations (default: 20)",
    )
    showing.add_argument("id", metavar="ID", help="ID of the operation, or a unique prefix")
    _add_decision(resolving)
    for action in (listing, showing, resolving):
        action.add_argument(
            "--state", metavar="DIRECTORY", help="state directory (default: as configured)"
        )
    for action in (listing, showing):
        action.add_argument("--json", action="store_true", help="print JSON")


def _add_decision(resolving: argparse.ArgumentParser) -> None:
    """The arguments of ``journal resolve``."""
    resolving.add_argument(
        "id", metavar="ID", nargs="?", help="ID of the operation, or a unique prefix"
    )
    resolving.add_argument(
        "--all",
        action="store_true",
        help="all operations that a damaged store left in doubt; only with --abandon",
    )
    decision = resolving.add_mutually_exclusive_group(required=True)
    for name, text in {
        "complete": "record the operation as done, and run nothing",
        "forward": "continue the operation",
        "back": "undo what the operation did",
        "abandon": "close the operation, neither done nor undone",
    }.items():
        decision.add_argument(
            f"--{name}", dest="decision", action="store_const", const=name, help=text
        )
    resolving.add_argument(
        "--why", required=True, metavar="TEXT", help="reason of the decision, kept in the journal"
    )


def _version_action() -> type[argparse.Action]:
    import argparse

    class Version(argparse.Action):
        """Reads the version only for this option: it takes 10 ms."""

        def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
            from importlib.metadata import version

            sys.stdout.write(f"reconciled {version('reconciled')}\n")
            parser.exit()

    return Version
