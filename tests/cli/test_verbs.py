"""Output and exit codes of check, plan, budget and allow, and of wrong usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from desk import Desk

from reconciled.core.resources import Key
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Hold
from reconciled.journal.removal_approvals import PendingApproval, read_pending, write_approval
from reconciled.journal.sqlite.store import Store
from reconciled.journal.state_lock import StateLock

# -- the command line ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 2),
        (("nope",), 2),
        (("check", "--nope"), 2),
        (("plan", "--once"), 2),
        (("allow",), 2),
        (("run", "--nope"), 78),
        (("run", "surplus"), 78),
        (("--help",), 0),
        (("run", "--help"), 0),
        (("--version",), 0),
    ],
)
def test_wrong_usage_has_its_code(desk: Desk, arguments: tuple[str, ...], code: int) -> None:
    """Wrong usage is 2, for run 78 (its unit does not restart on that); help and version are 0."""
    result = desk.say(*arguments)
    assert result.code == code
    assert result.out if code == 0 else "error:" in result.err


@pytest.mark.parametrize("verb", ["status", "get", "describe", "queue", "tasks"])
def test_a_verb_that_is_not_built_says_so(desk: Desk, verb: str) -> None:
    """A verb that is not built yet reports that, with 69, whatever its arguments."""
    for arguments in ((verb,), (verb, "c/a", "--json")):
        result = desk.say(*arguments)
        assert result.code == 69
        assert f"reconciled {verb}: not built yet in this version" in result.err
        assert result.out == ""


@pytest.mark.parametrize("verb", ["check", "plan", "budget", "allow"])
def test_a_missing_configuration_is_invalid(desk: Desk, verb: str) -> None:
    """Every verb that reads the configuration exits with 78 and names the missing file."""
    result = desk.say(verb, *(["c"] if verb == "allow" else []))
    assert result.code == 78
    assert result.lines[0] == "@/r.yaml:1:1: cannot be read: No such file or directory"


@pytest.mark.processes
def test_run_without_a_configuration_is_invalid(desk: Desk) -> None:
    """Run exits with 78, logs the name of the missing file, and creates no state."""
    code = "import sys; from reconciled.cli import main; sys.exit(main(sys.argv[1:]))"
    program = [sys.executable, "-c", code, "--config", str(desk.root / "r.yaml"), "run"]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ran.returncode == 78
    line = json.loads(ran.stderr.splitlines()[0])
    assert (line["event"], line["at"]) == ("config.invalid", f"{desk.root}/r.yaml:1:1")
    assert "No such file or directory" in line["reason"]
    assert not desk.state.exists()


# -- check ------------------------------------------------------------------------------------


def test_check_of_a_valid_configuration(desk: Desk) -> None:
    """Check prints all grades, the number of resources and the stop budget, and no errors."""
    desk.configure()
    desk.declare("a", text="x", seconds=20)
    result = desk.say("check")
    assert result.code == 0
    assert result.lines == [
        "syntax       ok",
        "schema       ok",
        "plugins      ok",
        "references   ok",
        "manifests    ok, 1 resource",
        "stop budget  5m8s, longest declared 20s",
        "unit         not checked: this machine was not booted with systemd",
        "@/r.yaml is valid.",
    ]
    assert not desk.state.exists()


CONTROLLER = "controllers:\n  c: {reconciler: 'mine:Noter', watch: [{directory: m}]}\n"
WRONG = {
    "syntax": (
        "state: x\nstop: [\n",
        ["@/r.yaml:3:1: did not find expected node content"],
        {"syntax": "1 problem", "schema": "not checked"},
    ),
    "schema": (
        "state: x\nstop: {drain: 10m}\ncontrolers: {}\n",
        [
            "@/r.yaml:2:15: stop.drain: is longer than critical (5m): lower it, or raise critical",
            "@/r.yaml:3:1: unknown key controlers: did you mean controllers?",
        ],
        {"syntax": "ok", "schema": "2 problems"},
    ),
    "plugins": (
        (
            "state: x\nplugins: {directories: [plugins]}\ncontrollers:\n"
            "  e: {reconciler: 'broken:X', watch: [{directory: m}]}\n"
        ),
        [
            (
                "@/r.yaml:4:3: controller e stalls: @/plugins/broken.py:1:1: reconciler broken:X"
                " cannot be used: ZeroDivisionError: division by zero"
            )
        ],
        {"plugins": "1 problem", "references": "ok", "manifests": "ok, 0 resources"},
    ),
    "references": (
        (
            "state: x\nplugins: {directories: [plugins]}\ncontrollers:\n"
            "  c: {reconciler: 'mine:Nooter', watch: [{directory: m}]}\n"
            "  d: {reconciler: 'mine:NeedsOptions', watch: [{directory: m2}]}\n"
            "  f: {reconciler: 'mine:NoPlan', watch: [{directory: m}]}\n"
            "  g: {reconciler: 'mine:Noter', watch: [{directory: m}]}\n"
        ),
        [
            (
                "@/r.yaml:4:19: controllers.c.reconciler: no reconciler mine:Nooter:"
                " @/plugins/mine.py has no class Nooter: did you mean Noter?"
            ),
            "@/r.yaml:5:6: controllers.d.options: root is missing: add root",
            (
                "@/r.yaml:7:41: controllers f (@/r.yaml:6:42) and g both take Note from @/m:"
                " give each a directory of its own"
            ),
        ],
        {"plugins": "ok", "references": "3 problems", "manifests": "ok, 0 resources"},
    ),
    "a missing directory": (
        "state: x\nplugins: {directories: [plugins]}\n" + CONTROLLER.replace("m}", "missing}"),
        ["@/r.yaml:4:3: directory @/missing cannot be read: @/missing does not exist"],
        {"references": "ok", "manifests": "1 problem"},
    ),
}


@pytest.mark.parametrize("grade", WRONG)
def test_check_of_an_invalid_configuration(desk: Desk, grade: str) -> None:
    """Check prints each problem with its location and what to write instead; 78 (C13, C14)."""
    text, problems, grades = WRONG[grade]
    desk.write("plugins/broken.py", "1/0", mode=0o644)
    desk.write("r.yaml", text)
    result = desk.say("check")
    assert result.code == 78
    assert result.err.splitlines() == problems
    assert result.out.endswith("@/r.yaml is not valid.\n")
    in_json = desk.say("check", "--json")
    assert in_json.code == 78
    assert in_json.data["valid"] is False
    assert grades.items() <= in_json.data["grades"].items()
    located = [
        f"{p['file']}:{p['line']}:{p['column']}: {p['message']}" for p in in_json.data["problems"]
    ]
    assert located == problems


def test_check_of_manifests(desk: Desk) -> None:
    """Check locates faults of manifests, kinds without a controller, and budgets too long."""
    desk.configure()
    desk.declare("good")
    desk.write("m/bad.yaml", "kind: [")
    desk.declare("long", seconds=600)
    desk.declare("other", kind="Other")
    desk.declare("typo", txt="x")
    result = desk.say("check")
    assert result.code == 78
    assert result.err.splitlines() == [
        "@/m/bad.yaml:2:1: did not find expected node content",
        (
            "@/m/long.yaml:1:56: spec: the critical budget 10m exceeds stop.critical (5m):"
            " lower the budget, or raise stop.critical"
        ),
        "@/m/other.yaml:1:1: no controller takes kind Other: write one of Note",
        "@/m/typo.yaml:1:57: unknown key txt: did you mean text?",
    ]
    assert "manifests    4 problems" in result.lines


def test_check_warns(desk: Desk) -> None:
    """Settings without effect, keys left behind and removals to be held are warnings."""
    desk.apply(*(f"c/k{number}" for number in range(6)), "old/a")
    desk.configure(head="http: {listen: '127.0.0.1:9464'}\n")
    desk.declare("x")
    result = desk.say("check")
    assert result.code == 0
    warnings = result.err.splitlines()
    assert len(warnings) == 3
    assert all(line.endswith("(warning)") for line in warnings)
    assert "http serves /livez and /readyz in this version" in warnings[0]
    assert (
        "controller old is not configured any more; what it applied is left as is (1 key)"
        in warnings[1]
    )
    assert "the removal of 6 of 7 keys would be held until `reconciled allow c`" in warnings[2]
    assert result.lines[-1] == "@/r.yaml is valid."
    strict = desk.say("check", "--strict", "--json")
    assert strict.code == 78
    assert strict.data["valid"] is False


def test_check_warns_of_what_cannot_be_rolled_back(desk: Desk) -> None:
    """A manifest that nothing can undo is a warning under interrupted: roll-back."""
    desk.configure(
        "  c: {reconciler: 'mine:Noter', interrupted: roll-back, watch: [{directory: m}]}\n"
    )
    desk.declare("x")
    (warning,) = desk.say("check").err.splitlines()
    assert warning.startswith("@/m/x.yaml:1:1: nothing can undo this Note")


# -- plan -----------------------------------------------------------------------------------------


def test_plan_without_changes(desk: Desk) -> None:
    """Plan exits with 0 if nothing is declared, or everything is as desired."""
    desk.configure()
    assert desk.say("plan").code == 0
    desk.declare("a", text="same")
    result = desk.say("plan")
    assert (result.code, result.lines) == (0, ["1 key: 0 to change, 1 as desired."])


def test_plan_with_changes(desk: Desk) -> None:
    """Plan prints each change with its detail, by key; 1. --json has the same data."""
    desk.configure()
    desk.declare("b", text="x")
    desk.declare("a", text="same")
    result = desk.say("plan")
    assert result.code == 1
    assert result.lines == [
        "~ c/b: write /etc/note",
        "    - old",
        "    + x",
        "2 keys: 1 to change, 1 as desired.",
    ]
    data = desk.say("plan", "--json").data
    assert data[1] == {
        "key": "c/b",
        "changes": [{"action": "write", "what": "/etc/note", "detail": "- old\n+ x"}],
        "unknown": False,
        "held": False,
        "error": None,
        "operation": None,
    }


def test_plan_of_some_keys(desk: Desk) -> None:
    """Plan KEY plans the named keys alone; an unknown key is named, and the code is 70."""
    desk.configure()
    desk.declare("a", text="x")
    desk.declare("b", text="y")
    result = desk.say("plan", "c/a")
    assert (result.code, result.lines[-1]) == (1, "1 key: 1 to change, 0 as desired.")
    result = desk.say("plan", "c/a", "c/zz")
    assert result.code == 70
    assert result.err == "c/zz: unknown key, neither declared nor applied: write CONTROLLER/NAME\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("exits", "SystemExit: 3"),
        ("refuses", "no such user"),
        ("garbage", "plan() returned ['x']: return a list of Change"),
        ("nothing", "plan() returned None: return a list of Change"),
        ("acts", "called operation('write'): a plan has no effects"),
    ],
)
def test_plan_of_a_fault(desk: Desk, text: str, reason: str) -> None:
    """Any fault of plan() is printed in the line of its key; other keys are planned (C15)."""
    desk.configure()
    desk.declare("a", text=text)
    desk.declare("b", text="x")
    result = desk.say("plan")
    assert result.code == 70
    assert result.lines[0].startswith("? c/a: cannot be planned: ")
    assert reason in result.lines[0]
    assert "~ c/b: write /etc/note" in result.lines
    assert "Traceback" not in result.out + result.err


def test_plan_of_a_reconciler_without_plan(desk: Desk) -> None:
    """A key without plan() is unknown, and a change only if its spec is not applied yet."""
    desk.configure("  c: {reconciler: 'mine:NoPlan', watch: [{directory: m}]}\n")
    desk.declare("a", text="x")
    desk.declare("b", text="y")
    desk.apply("c/a", text="x")
    result = desk.say("plan")
    assert result.code == 1
    assert result.lines == [
        "? c/a: unknown: its reconciler has no plan()",
        "? c/b: unknown: its reconciler has no plan()",
        "~ c/b: reconcile Note",
        "    declared, not applied yet",
        "2 keys: 1 to change, 0 as desired, 1 unknown.",
    ]


def test_plan_of_removals(desk: Desk) -> None:
    """Keys applied and not declared any more are removals, which are held if they are too many."""
    desk.configure()
    desk.declare("a", text="same")
    desk.apply("c/a", text="same")
    desk.apply("c/b", text="old")
    result = desk.say("plan")
    assert result.code == 1
    assert "~ c/b: remove Note" in result.lines
    desk.apply(*(f"c/k{number}" for number in range(6)), text="old")
    result = desk.say("plan")
    assert "~ c/k0: remove Note (held until `reconciled allow c`)" in result.lines


async def leave_operations(state: Path) -> None:
    """Leave c/a with an open operation, and c/b with a held one."""
    store = Store.open(state)
    journal = OperationJournal.load(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        await journal.begin(Key("c/a"), "write", {})
        held = await journal.begin(Key("c/b"), "write", {})
        await journal.hold(held.id, Hold("a step has no result", "decision", "", 1.0))
        nursery.cancel_scope.cancel(reason="left")


def test_plan_marks_open_operations(desk: Desk) -> None:
    """An open operation is printed with its key, and a held one with its reason."""
    desk.configure()
    desk.apply("c/a", "c/b", text="x")
    for name in "ab":
        desk.declare(name, text="x")
    trio.run(leave_operations, desk.state)
    result = desk.say("plan")
    (opened, held) = (each["operation"] for each in desk.say("plan", "--json").data)
    assert result.code == 0
    assert result.lines == [
        f"! c/a: operation write ({opened['id']}) is open: it is recovered first",
        (
            f"! c/b: operation write ({held['id']}) is held: a step has no result;"
            f" see `reconciled journal show {held['id']}`"
        ),
        "2 keys: 0 to change, 2 as desired.",
    ]
    assert (opened["hold"], held["hold"]) == (None, "a step has no result")


def test_c10_plan_of_an_unreadable_source(desk: Desk) -> None:
    """An unreadable source plans no removals: 70, with the reason (C10)."""
    desk.configure()
    desk.apply("c/a", text="x")
    (desk.root / "m").rmdir()
    result = desk.say("plan")
    assert result.code == 70
    assert result.err == "directory @/m cannot be read: @/m does not exist\n"
    assert result.out == "0 keys: 0 to change, 0 as desired.\n"


def test_plan_of_an_invalid_configuration(desk: Desk) -> None:
    """An unknown reconciler is 78, as at the start of the daemon."""
    desk.configure("  c: {reconciler: 'mine:Nooter', watch: [{directory: m}]}\n")
    result = desk.say("plan")
    assert result.code == 78
    assert "did you mean Noter?" in result.err


def test_r7_plan_beside_a_daemon_writes_nothing(desk: Desk) -> None:
    """With the state locked by a daemon, a plan neither waits nor changes a byte (R7)."""
    desk.configure()
    desk.declare("a", text="x")
    desk.declare("b", text="y")
    desk.apply("c/a", text="x")
    lock = StateLock.acquire(desk.state)
    before = desk.tree()
    result = desk.say("plan")
    assert (result.code, result.lines[-1]) == (1, "2 keys: 1 to change, 1 as desired.")
    assert desk.say("check").code == 0
    assert desk.tree() == before
    lock.release()


def test_plan_makes_no_state(desk: Desk) -> None:
    """A plan creates no state directory."""
    desk.configure()
    desk.declare("a", text="x")
    assert desk.say("plan").code == 1
    assert not desk.state.exists()


def test_plan_of_a_store_that_cannot_be_read(desk: Desk) -> None:
    """A damaged store is 70 with one line of error, not a traceback or an empty plan."""
    desk.configure()
    desk.apply("c/a", text="x")
    for file in (desk.state / "store").iterdir():
        file.write_bytes(b"no database" * 1000)
    result = desk.say("plan")
    assert result.code == 70
    assert result.err.startswith("reconciled plan: ")
    assert "Traceback" not in result.err


# -- budget ---------------------------------------------------------------------------------------


def test_budget_that_fits(desk: Desk) -> None:
    """Budget prints the stages, their sum and the declared budgets, the longest first; 0."""
    desk.configure(head="stop: {drain: 10s, critical: 2m, cleanup: 4s}\n")
    for number in range(12):
        desk.declare(f"k{number}", seconds=number)
    result = desk.say("budget")
    assert result.code == 0
    numbers = [" ".join(line.split()[:-1]) for line in result.lines[:5]]
    assert [line.split()[0] for line in numbers] == [
        "drain",
        "critical",
        "cleanup",
        "last",
        "budget",
    ]
    assert result.lines[4].split()[:2] == ["budget", "2m7s"]
    assert result.lines[8].split() == ["11s", "c/k11"]
    assert result.lines[18] == "  … and 1 more"
    assert "With these budgets a stop needs at most 18s." in result.lines
    data = desk.say("budget", "--json").data
    assert (data["drain_s"], data["critical_s"], data["budget_s"]) == (10, 120, 127)
    assert data["declared"][0] == {"key": "c/k11", "budget_s": 11.0}


def test_budget_that_does_not_fit(desk: Desk) -> None:
    """A manifest that declares more than stop.critical is named, and the code is 1."""
    desk.configure()
    desk.declare("long", seconds=600)
    result = desk.say("budget")
    assert result.code == 1
    assert result.err == "c/long declares 10m: longer than stop.critical (5m)\n"
    assert "With these budgets a stop needs at most 5m8s." in result.lines


def test_budget_without_declarations(desk: Desk) -> None:
    """Budget reports that no budget is declared; an invalid configuration is 78."""
    desk.configure()
    result = desk.say("budget")
    assert result.code == 0
    assert "No manifest declares a critical budget." in result.lines
    desk.configure("  c: {reconciler: 'mine:Nooter', watch: [{directory: m}]}\n")
    assert desk.say("budget").code == 78


# -- allow ----------------------------------------------------------------------------------------


def test_allow_when_nothing_is_held(desk: Desk) -> None:
    """Allow exits with 4 if nothing is held or the controller is unknown, and writes no file."""
    desk.configure()
    assert desk.say("allow", "c").lines == ["No removals of c are held."]
    assert desk.say("allow", "c").code == 4
    result = desk.say("allow", "d")
    assert (result.code, result.err) == (
        4,
        "reconciled allow: controller d is not configured; configured are: c\n",
    )
    assert not desk.state.exists()


def test_allow_approves_exactly_what_is_shown(desk: Desk) -> None:
    """The approval names the held keys and no others; they are printed, and the code is 0."""
    desk.configure()
    (desk.state / "removals").mkdir(parents=True)
    held = PendingApproval("c", tuple(Key(f"c/k{number}") for number in range(25)), 30)
    write_approval(
        desk.state, held
    )  # the daemon's own record has the same form, and one field more
    approval = desk.state / "removals" / "c.allow"
    text = approval.read_text().replace("{", '{"owned": 30, ', 1)
    approval.rename(desk.state / "removals" / "c.held").write_text(text)
    assert read_pending(desk.state, "c") == held
    result = desk.say("allow", "c")
    assert result.code == 0
    assert result.lines[0] == "Approved, once: the removal of 25 of 30 keys of c."
    assert result.lines[1:21] == [f"  c/k{number}" for number in range(20)]
    assert result.lines[21] == "  … and 5 more"
    assert approval.read_text() == '{"keys": [' + ", ".join(f'"{k}"' for k in held.keys) + "]}"
    assert approval.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "[]", '{"keys": [1], "owned": 1}', '{"keys": ["c/a"]}'])
def test_allow_of_a_damaged_record(desk: Desk, content: str) -> None:
    """A damaged record of held removals approves nothing: 1, with the file's name."""
    desk.configure()
    (desk.state / "removals").mkdir(parents=True)
    desk.write("state/removals/c.held", content)
    result = desk.say("allow", "c")
    assert result.code == 1
    assert result.err.startswith("reconciled allow: ")
    assert not (desk.state / "removals" / "c.allow").exists()
