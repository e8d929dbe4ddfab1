"""What linters cannot hold: the size of things, who imports whom, and words that must not stand.

The rules are those of CONTRIBUTING.md; the table of packages is read from docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "reconciled"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
SCRIPTS = sorted([*(ROOT / "config").rglob("*.py"), *(ROOT / "bench").rglob("*.py")])

LONGEST_MODULE = 600
MOST_MODULES = 16
LONGEST_FUNCTION = 50

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of *path*."""
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    """*path* as messages name it."""
    return str(path.relative_to(ROOT))


def functions(tree: ast.Module) -> Iterator[Function]:
    """Every function in *tree*, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def modules_imported(tree: ast.Module) -> Iterator[str]:
    """The full name of each module that *tree* imports anywhere but for types alone."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def own_imports(path: Path) -> set[str]:
    """The parts of this package that *path* imports: ``core``, ``api``, and so on."""
    return {
        module.split(".")[1]
        for module in modules_imported(tree_of(path))
        if module.startswith("reconciled.")
    }


def part_of(path: Path) -> str:
    """The part of the package that *path* belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


# -- size ------------------------------------------------------------------------------------


def test_modules_are_short() -> None:
    """A module of the package has at most 600 lines: a longer one hides a second concept."""
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in lengths.items() if count > LONGEST_MODULE} == {}


def test_directories_are_small() -> None:
    """A directory of the package has at most 16 modules: more, and nothing is found in it."""
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in MODULES)
    assert {name: count for name, count in counts.items() if count > MOST_MODULES} == {}


def test_functions_are_short() -> None:
    """A function of the package has at most 50 lines."""
    long = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in MODULES
        for node in functions(tree_of(path))
        if (node.end_lineno or 0) - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert long == []


# -- text ------------------------------------------------------------------------------------


def test_each_test_states_its_rule() -> None:
    """A test has a docstring: one sentence with the rule that it proves."""
    silent = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in TESTS
        for node in functions(tree_of(path))
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


def test_each_module_says_what_it_is_for() -> None:
    """A module begins with a docstring."""
    assert [name_of(path) for path in MODULES if not ast.get_docstring(tree_of(path))] == []


def tracked() -> list[Path]:
    """The files that git knows; all of them where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        paths = (path for path in ROOT.rglob("*") if path.is_file())
        return [path for path in paths if not any(part[:5] == ".venv" for part in path.parts)]
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


# Written in pieces, so that this file does not name them either.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.$}])/" + r"(work|home/\w+)/",
    "a registry host": "py" + r"pi\.org|python" + r"hosted\.org",
    "an open end": r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    # pytest's own word for a whole run of tests is none of these.
    "where the work was talked about": r"(?i)(?<!scope=\")\b(sess" + r"ion|tick" + r"et)s?\b",
}
# The kernel groups processes in something of that name.
ABOUT_PROCESSES = ("reconciled/programs/", "tests/programs/", "docs/reconcilers.md")


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names_what_is_not_of_the_product(what: str) -> None:
    """No file names a path of one machine, a registry, an open end, or how it came about."""
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in tracked()
        if not ("talked" in what and name_of(path).startswith(ABOUT_PROCESSES))
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


# Pronouns that hide the actor; also as parts of names, and written in pieces as above.
UNNAMED_ACTORS = r"(?i)(?<![a-z])((no|some|every)" + r"body|who" + r"ever)(?![a-z])"


def test_no_file_leaves_the_actor_unnamed() -> None:
    """No file but CONTRIBUTING.md, which forbids them, has a pronoun in place of the actor."""
    pattern = re.compile(UNNAMED_ACTORS)
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in tracked()
        if name_of(path) != "CONTRIBUTING.md"
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


# -- cancellation and processes --------------------------------------------------------------


def shields(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls with ``shield=`` anything but False, and none for ``.shield = True``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "shield" and ast.unparse(keyword.value) != "False":
                    yield node


def is_bounded(call: ast.Call) -> bool:
    """Whether *call* makes a scope that ends by itself."""
    names = {keyword.arg for keyword in call.keywords}
    timed = ast.unparse(call.func).rpartition(".")[2] in {"move_on_after", "fail_after"}
    return timed or "deadline" in names or "relative_deadline" in names


def test_every_shield_has_a_deadline() -> None:
    """A shield names its deadline in the same call, wherever it stands (invariant 6)."""
    endless = [
        f"{name_of(path)}:{call.lineno}"
        for path in MODULES
        for call in shields(tree_of(path))
        if not is_bounded(call)
    ]
    assert endless == []


def test_no_scope_is_shielded_afterwards() -> None:
    """Nothing sets ``.shield``: a shield that comes later escapes the rule above."""
    later = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr == "shield"
        and isinstance(node.ctx, ast.Store)
    ]
    assert later == []


def test_a_cancellation_gives_its_reason() -> None:
    """Each ``scope.cancel()`` says why: the task tree and tracebacks show it."""
    silent = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "cancel"
        and "reason" not in {keyword.arg for keyword in node.keywords}
    ]
    assert silent == []


def test_no_shell_reads_a_command() -> None:
    """No call has ``shell=`` or is os.system: programs are lists of arguments."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in [*MODULES, *SCRIPTS]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and (
            "shell" in {keyword.arg for keyword in node.keywords}
            or ast.unparse(node.func) in {"os.system", "os.popen"}
        )
    ]
    assert found == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether *handler* takes everything, cancellations too, and does nothing about it."""
    kinds = "" if handler.type is None else ast.unparse(handler.type)
    everything = handler.type is None or "BaseException" in kinds or "Cancelled" in kinds
    return everything and all(isinstance(each, ast.Pass | ast.Continue) for each in handler.body)


def test_no_cancellation_is_swallowed() -> None:
    """No handler takes BaseException or Cancelled and passes over it."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert found == []


# -- who imports whom ------------------------------------------------------------------------


def imported_modules(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of ours that *path* imports anywhere, for types alone as well."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
    return found & known.keys()


def dotted(path: Path) -> str:
    """The module's name as an import writes it."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_import_runs_in_a_circle() -> None:
    """No module imports itself by way of others, not even for types alone.

    The faces of packages (``__init__``) are left out: they hand on what their modules define.
    """
    known = {dotted(path): path for path in MODULES}
    graph = {
        name: {each for each in imported_modules(path, known) if known[each].stem != "__init__"}
        for name, path in known.items()
        if path.stem != "__init__"
    }
    while bottom := [name for name, imports in graph.items() if not imports & graph.keys()]:
        for name in bottom:
            del graph[name]
    assert sorted(graph) == []


CORE_MAY = {"attrs", "cronsim"}
PLUGINS_MAY = {"attrs", "trio"}


def foreign_imports(path: Path) -> set[str]:
    """The top-level packages that *path* imports, without ours and the standard library."""
    tops = {module.partition(".")[0] for module in modules_imported(tree_of(path))}
    return tops - {"reconciled"} - set(sys.stdlib_module_names)


def test_the_core_is_pure() -> None:
    """The core imports itself, attrs and the arithmetic of cron, and no module that does I/O."""
    effects = {"asyncio", "logging", "os", "pathlib", "select", "socket", "subprocess", "threading"}
    wrong = {
        name_of(path): sorted(found)
        for path in MODULES
        if part_of(path) == "core"
        and (
            found := (own_imports(path) - {"core"})
            | (foreign_imports(path) - CORE_MAY)
            | ({*modules_imported(tree_of(path))} & (effects | {"time"}))
        )
    }
    assert wrong == {}


def test_imports_are_absolute() -> None:
    """No import begins with a dot."""
    relative = [
        f"{name_of(path)}:{node.lineno}"
        for path in [*MODULES, *TESTS]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def table() -> dict[str, set[str]]:
    """Which parts may import which others, by the table of docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows: dict[str, set[str]] = {}
    for names, allowed in re.findall(r"^\| (`[^|]+) \|[^|]+\| ([^|]+) \|$", text, re.MULTILINE):
        parts = [name.strip("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", names)]
        words = set(re.findall(r"[a-z_]+", allowed))
        if "everything" in words:
            words |= {part_of(path) for path in MODULES}
        if {"all", "above"} <= words:
            words |= rows.keys()
        for part in parts:
            rows[part] = words | set(parts)
    return rows


def test_the_table_of_packages_names_every_package() -> None:
    """Each directory of the package has its row in docs/architecture.md."""
    directories = {part_of(path) for path in MODULES if path.parent != PACKAGE}
    assert sorted(directories - table().keys()) == []


def leaves() -> set[str]:
    """Single modules beside the packages that have no row: anybody may import them."""
    single = {part_of(path) for path in MODULES if path.parent == PACKAGE}
    return single - table().keys() - {"__init__"}


@pytest.mark.parametrize("part", sorted(table()))
def test_packages_import_what_the_table_allows(part: str) -> None:
    """A part of the package imports itself, leaves, and what docs/architecture.md allows it."""
    allowed = table()[part] | leaves()
    wrong = {
        name_of(path): sorted(found)
        for path in MODULES
        if part_of(path) == part and (found := own_imports(path) - allowed)
    }
    assert wrong == {}


def test_leaves_import_only_what_lies_below() -> None:
    """A module without a row imports only the core, the stop and leaves, never around the table."""
    allowed = leaves() | {"core", "stop"}
    wrong = {
        name_of(path): sorted(found)
        for path in MODULES
        if part_of(path) in leaves() and (found := own_imports(path) - allowed)
    }
    assert wrong == {}


def test_built_in_reconcilers_use_what_plugins_may() -> None:
    """A built-in reconciler imports reconciled.api and its own package, like any plugin."""
    wrong = {
        name_of(path): sorted(found)
        for path in MODULES
        if part_of(path) == "reconcilers"
        and (
            found := (own_imports(path) - {"api", "reconcilers"})
            | (foreign_imports(path) - PLUGINS_MAY)
        )
    }
    assert wrong == {}


def test_helpers_of_the_tests_have_names_of_their_own() -> None:
    """Test folders are no packages: of two helper modules with one name only one is importable."""
    names = Counter(
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        if not path.name.startswith("test_") and path.name != "conftest.py"
    )
    assert [name for name, count in names.items() if count > 1] == []
