"""Plugins: found by name, loaded again at each reload, and their faults contained (C15)."""

from __future__ import annotations

import importlib.metadata
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from reconciled.config.load import load
from reconciled.config.manifests import Parser
from reconciled.config.model import ControllerConfig
from reconciled.core.errors import Invalid, PluginBroken, PluginNotFound
from reconciled.core.resources import Origin
from reconciled.plugins import loading
from reconciled.plugins.discovery import find_reconciler
from reconciled.plugins.loading import Plugin
from reconciled.runtime.controllers.factory import spec_reader
from reconciled.runtime.controllers.loading import LoadedController

MOTD = """from __future__ import annotations
import attrs
from reconciled.api import Reconciler, Request, Result, done

@attrs.frozen
class Motd:
    path: str
    text: str = "VERSION 1"

class MotdReconciler(Reconciler[Motd]):
    async def reconcile(self, request: Request[Motd]) -> Result:
        return done()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A plugin directory that no other user can write; its modules are unloaded afterwards."""
    directory = tmp_path / "plugins"
    directory.mkdir(mode=0o755)
    yield directory
    for name in [name for name in sys.modules if name.startswith("reconciled_plugin_")]:
        del sys.modules[name]


def plugin(folder: Path, text: str, name: str = "MotdReconciler") -> Plugin:
    path = folder / "motd.py"
    path.write_text(text)
    path.chmod(0o644)
    return loading.load(find_reconciler(f"motd:{name}", [folder]))


def broken(folder: Path, text: str) -> PluginBroken:
    with pytest.raises(PluginBroken) as caught:
        plugin(folder, text)
    return caught.value


def test_built_in() -> None:
    """The built-in reconcilers are found by name, with their kinds."""
    loaded = loading.load(find_reconciler("exec"))
    assert (loaded.name, loaded.kind, loaded.spec_class.__name__) == ("exec", "Exec", "Exec")
    assert loading.load(find_reconciler("file")).kind == "File"


def test_built_in_without_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in reconciler is found without a scan of installed packages."""
    monkeypatch.setattr(importlib.metadata, "entry_points", None)
    find_reconciler("exec")
    find_reconciler("file")


def test_a_file(folder: Path) -> None:
    """A class of a file in a plugin directory is a plugin, with its file as its origin."""
    loaded = plugin(folder, MOTD)
    assert loaded.origin == str(folder / "motd.py")
    assert loaded.kind == "Motd"
    assert loaded.spec_class is sys.modules[loaded.cls.__module__].Motd
    assert loaded.options_class is None
    assert loaded.warnings == ()


def test_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package offers reconcilers by entry points, with the package's version."""
    info = tmp_path / "motd-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: motd\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(
        "[reconciled.reconcilers]\nmotd = motd_package:MotdReconciler\n"
    )
    (tmp_path / "motd_package.py").write_text(MOTD)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = loading.load(find_reconciler("motd"))
    assert (loaded.version, loaded.kind) == ("2.5", "Motd")
    with pytest.raises(PluginNotFound, match="did you mean motd"):
        find_reconciler("modt")


def test_c13_a_reload_reads_the_current_file(folder: Path) -> None:
    """Each load makes a separate module: the new class is of the new file, the old one remains."""
    old = plugin(folder, MOTD)
    new = plugin(folder, MOTD.replace("VERSION 1", "VERSION 2"))
    assert old.spec_class("/x").text == "VERSION 1"
    assert new.spec_class("/x").text == "VERSION 2"
    assert old.cls.__module__ != new.cls.__module__
    assert plugin(folder, MOTD).cls is not old.cls


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exce", "no reconciler exce: did you mean exec?"),
        ("nothing-like-it", "available: exec, file"),
        ("motd", "for its file write motd:CLASS"),
        ("mtod:MotdReconciler", "did you mean motd:MotdReconciler?"),
        ("qqqqqq:X", "no plugin file qqqqqq.py in "),
        ("../motd:X", "write FILE:CLASS"),
        ("motd:X.Y", "write FILE:CLASS"),
        (":X", "write FILE:CLASS"),
    ],
)
def test_c13_an_unknown_name_is_not_found(folder: Path, name: str, words: str) -> None:
    """An unknown name is PluginNotFound, with the closest name; nothing is imported."""
    (folder / "motd.py").write_text("raise SystemExit(3)")
    with pytest.raises(PluginNotFound) as caught:
        find_reconciler(name, [folder])
    assert words in str(caught.value)


def test_a_missing_class_is_not_found(folder: Path) -> None:
    """A class that the file does not define is PluginNotFound, with the closest name."""
    with pytest.raises(
        PluginNotFound, match=r"no class MotdReconcilr: did you mean MotdReconciler\?"
    ):
        plugin(folder, MOTD, "MotdReconcilr")


def test_without_directories() -> None:
    """FILE:CLASS without a plugin directory is refused with the setting that is missing."""
    with pytest.raises(PluginNotFound, match=r"set plugins\.directories, which is empty"):
        find_reconciler("motd:X")


def test_a_file_in_two_directories(folder: Path, tmp_path: Path) -> None:
    """One file name in two plugin directories is an error that names both."""
    (folder / "motd.py").touch()
    (tmp_path / "motd.py").touch()
    with pytest.raises(PluginNotFound, match="two plugin directories"):
        find_reconciler("motd:X", [folder, tmp_path])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("import sys; sys.exit(3)", "its import called sys.exit(3)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise ExceptionGroup('group', [ValueError('x')])", "ExceptionGroup: group"),
        ("raise BaseExceptionGroup('group', [SystemExit(1)])", "BaseExceptionGroup: group"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("def f(): f()\nf()", "RecursionError"),
        ("raise MemoryError", "MemoryError"),
    ],
)
def test_c15_what_an_import_raises(folder: Path, line: str, reason: str) -> None:
    """Whatever an import raises is PluginBroken, with the line in the plugin's own file."""
    error = broken(folder, "# first line\n" + line)
    assert reason in error.reason
    assert error.origin.file == str(folder / "motd.py")
    assert error.origin.line >= 2
    assert not [name for name in sys.modules if name.startswith("reconciled_plugin_motd")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("MotdReconciler = 5", "it is not a subclass of reconciled.api.Reconciler"),
        (MOTD.replace("async def", "def"), "its method reconcile is not async"),
        (MOTD + "    def remove(self, request): ...\n", "its method remove is not async"),
        (MOTD.replace("async def reconcile", "async def other"), "it does not define reconcile"),
        (MOTD.replace("[Motd])", ")"), "its spec is not an attrs class: write"),
        (MOTD.replace("@attrs.frozen\n", ""), "its spec is not an attrs class: write"),
        (MOTD + "    kind = 5\n", "its kind must consist of letters and digits"),
        (MOTD + "    kind = 'a/b'\n", "its kind must consist of letters and digits"),
        (MOTD + "    Options = dict\n", "its Options is not an attrs class: put"),
    ],
)
def test_c15_a_class_that_breaks_the_contract(folder: Path, text: str, reason: str) -> None:
    """A class that breaks the contract is PluginBroken at its line, with what to write."""
    error = broken(folder, text)
    assert error.reason.startswith(reason)
    assert error.origin.file == str(folder / "motd.py")
    lines = text.splitlines()
    defined = [number for number, line in enumerate(lines, 1) if line.startswith("class MotdR")]
    assert [error.origin.line] == (defined or [1])


def test_spec_of_a_base_class_and_by_name(folder: Path) -> None:
    """The spec class may be given by a base class, or as a string."""
    text = MOTD + "class Child(MotdReconciler):\n    kind = 'Other'\n"
    text = text.replace("Reconciler[Motd])", "Reconciler['Motd'])")
    loaded = plugin(folder, text, "Child")
    assert (loaded.kind, loaded.spec_class.__name__) == ("Other", "Motd")


def test_c15_signal_handling_is_restored(folder: Path) -> None:
    """Changes of signal handling by an import are undone and reported, even if it fails."""
    text = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal = print
signal.set_wakeup_fd(-1)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
"""
    handler, function = signal.getsignal(signal.SIGTERM), signal.signal
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        loaded = plugin(folder, MOTD + text)
        wakeup = signal.set_wakeup_fd(writing)
        assert wakeup == writing
        broken(folder, text + "raise ValueError")
        assert signal.set_wakeup_fd(writing) == writing
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.signal is function
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert loaded.warnings == (
        "it patched the signal module; undone",
        "it changed the handler of SIGTERM; undone",
        "it changed the wakeup descriptor of signals; undone",
        "it changed the signal mask; undone",
    )


def test_loading_in_a_thread(folder: Path) -> None:
    """A plugin can be loaded outside the main thread."""
    found: list[Plugin] = []
    thread = threading.Thread(target=lambda: found.append(plugin(folder, MOTD)))
    thread.start()
    thread.join(10)
    assert [loaded.kind for loaded in found] == ["Motd"]


def test_files_that_other_users_can_write_are_refused(folder: Path) -> None:
    """Code that other users can write is never run, nor is code in such a directory."""
    path = folder / "motd.py"
    path.write_text("raise AssertionError('was run')")
    for changed, mode in ((path, 0o666), (folder, 0o777)):
        path.chmod(0o644)
        changed.chmod(mode)
        with pytest.raises(
            PluginBroken, match=f"can be written by all users: chmod go-w {changed}$"
        ):
            loading.load(find_reconciler("motd:X", [folder]))


def test_specs_are_validated_at_their_location(folder: Path) -> None:
    """Problems of a spec have line and column; manifests of other kinds are not checked."""
    loaded = plugin(folder, MOTD)
    text = b"""kind: Motd
metadata: {name: a}
spec: {path: 5, txet: x}
---
kind: Other
metadata: {name: b}
spec: {anything: 1}
"""
    ready = LoadedController(None, loaded, loaded.cls(None))  # type: ignore[arg-type]  # of no use here
    manifests, problems = Parser(spec_reader(ready, lambda: math.inf)).parse(text, "f")
    assert [manifest.name for manifest in manifests] == ["b"]
    assert [str(problem) for problem in problems] == [
        'f:3:14: spec.path: takes text, got the number 5: write "5"',
        "f:3:17: unknown key txet: did you mean text?",
    ]


def test_spec_of_a_manifest(folder: Path) -> None:
    """The spec of a manifest is structured as the plugin's class; a fault is at the manifest."""
    loaded = plugin(folder, MOTD)
    text = b"\n\nkind: Motd\nmetadata: {name: a}\nspec: {path: /x}\n"
    ((manifest,), _) = Parser().parse(text, "f")
    assert loaded.spec_of(manifest) == loaded.spec_class("/x")
    with pytest.raises(Invalid, match=r"^f:3:1: spec\.path: takes text"):
        loaded.spec_of(attrs.evolve(manifest, spec={"path": None}))
    assert manifest.origin == Origin("f", 3, 1)


def reader(loaded: Plugin) -> Parser:
    """A parser of manifests for a controller with the plugin *loaded*."""
    ready: Any = LoadedController(config=None, plugin=loaded, reconciler=loaded.cls())  # type: ignore[arg-type]
    return Parser(spec_reader(ready, lambda: math.inf))


def test_a_parsed_manifest_carries_its_spec(folder: Path) -> None:
    """The object that validation made is the one that budgets, plans and runs get."""
    text = MOTD.replace(
        '"VERSION 1"', '"x"\n    def __attrs_post_init__(self): made.append(self.path)'
    ).replace("import attrs", "import attrs\nmade = []")
    loaded = plugin(folder, text)
    data = b"kind: Motd\nmetadata: {name: a}\nspec: {path: /x}\n"
    (manifest,), problems = reader(loaded).parse(data, "f")
    assert problems == []
    assert loaded.spec_of(manifest) is manifest.typed_spec
    assert loaded.spec_of(manifest).path == "/x"
    assert vars(sys.modules[loaded.cls.__module__])["made"] == ["/x"]


def test_the_carried_spec_is_not_part_of_the_manifest(folder: Path) -> None:
    """It takes no part in equality, repr or fingerprint, and a changed copy lacks it."""
    data = b"kind: Motd\nmetadata: {name: a}\nspec: {path: /x}\n"
    ((typed,), _), ((plain,), _) = (
        reader(plugin(folder, MOTD)).parse(data, "f"),
        Parser().parse(data, "f"),
    )
    assert (typed, repr(typed), typed.fingerprint) == (plain, repr(plain), plain.fingerprint)
    assert plain.typed_spec is None
    assert attrs.evolve(typed, spec={"path": "/y"}).typed_spec is None


def test_c13_a_manifest_from_before_a_reload_is_structured_anew(folder: Path) -> None:
    """No object of a class that a reload replaced reaches the new controller."""
    old = plugin(folder, MOTD)
    new = plugin(folder, MOTD.replace("VERSION 1", "VERSION 2"))
    data = b"kind: Motd\nmetadata: {name: a}\nspec: {path: /x}\n"
    ((manifest,), _) = reader(old).parse(data, "f")
    assert old.spec_of(manifest).text == "VERSION 1"
    assert type(new.spec_of(manifest)) is new.spec_class
    assert new.spec_of(manifest).text == "VERSION 2"
    assert manifest.typed_spec.text == "VERSION 1"


def test_c15_a_spec_that_fails_is_a_problem_of_its_manifest(folder: Path) -> None:
    """What __attrs_post_init__ raises is reported at the spec, and its neighbours are parsed."""
    text = MOTD.replace(
        '"VERSION 1"',
        '"x"\n    def __attrs_post_init__(self):\n'
        '        if self.path == "/bad": raise OSError("no")',
    )
    good = b"kind: Motd\nmetadata: {name: a}\nspec: {path: /x}\n"
    data = good + b"---\n" + good.replace(b"name: a", b"name: b").replace(b"/x", b"/bad")
    manifests, problems = reader(plugin(folder, text)).parse(data, "f")
    assert [manifest.name for manifest in manifests] == ["a"]
    assert [str(problem) for problem in problems] == ["f:7:7: spec: no"]


def test_c15_a_spec_that_ends_the_process(folder: Path) -> None:
    """A spec class that calls sys.exit() is a problem of that one manifest."""
    text = MOTD.replace(
        '"VERSION 1"', '"x"\n    def __attrs_post_init__(self): raise SystemExit(3)'
    )
    ((manifest,), _) = Parser().parse(b"kind: Motd\nmetadata: {name: a}\nspec: {path: x}", "f")
    with pytest.raises(Invalid):
        plugin(folder, text).spec_of(manifest)


def test_options(folder: Path, tmp_path: Path) -> None:
    """Options are read as the plugin's class, strictly, with every fault at its location."""
    text = MOTD + "    @attrs.frozen\n    class Options:\n        root: str = '/'\n"
    configuration = tmp_path / "c.yaml"

    def controller(options: str) -> ControllerConfig:
        configuration.write_text(
            "state: /x\ncontrollers:\n  motd:\n    reconciler: motd:MotdReconciler\n"
            f"    watch: [every: 1m]\n    options: {options}\n"
        )
        configuration.chmod(0o644)
        return load(configuration, {}).config.controllers["motd"]

    with_options, without = plugin(folder, text), plugin(folder, MOTD)
    assert with_options.options(controller("{root: /srv}")).root == "/srv"
    assert with_options.options(controller("{}")).root == "/"
    assert without.options(controller("{}")) is None
    with pytest.raises(Invalid, match=r"c\.yaml:6:15: unknown key rot: did you mean root\?"):
        with_options.options(controller("{rot: x}"))
    with pytest.raises(Invalid, match=r"c\.yaml:6:14: .* takes no options: remove them"):
        without.options(controller("{root: x}"))


@pytest.mark.processes
def test_c15_the_process_survives_a_plugin_that_exits(folder: Path) -> None:
    """A process that loads a plugin which exits at import is not ended by it."""
    (folder / "motd.py").write_text("import sys; sys.exit(3)")
    (folder / "motd.py").chmod(0o644)
    program = (
        "import pathlib, sys\n"
        "from reconciled.core.errors import PluginBroken\n"
        "from reconciled.plugins.discovery import find_reconciler\n"
        "from reconciled.plugins.loading import load\n"
        "try: load(find_reconciler('motd:X', [pathlib.Path(sys.argv[1])]))\n"
        "except PluginBroken as error: print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True
    )
    assert f"{folder}/motd.py:1:1: reconciler motd:X cannot be used: its import" in ran.stdout
