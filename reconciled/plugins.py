"""Reconcilers by their names: finding them, loading them, and keeping their faults to themselves.

1. A name that leads nowhere is NotFound: the configuration is invalid. What is found and cannot
   be used is Broken: it stalls its own controller and nothing else, whatever its import raised.
2. A plugin that is a single file is read anew at each load, as a module of its own, so that a
   reload sees the file of now, and runs that are not over keep the classes they began with.
   Packages are imported once a process, as Python does; changing one takes a restart.
3. An import leaves no trace in how signals are handled: a stop would depend on it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ForwardRef, TypeVar, get_args, get_origin

import attrs
import trio

from reconciled.api import Reconciler
from reconciled.config.faults import guess
from reconciled.config.manifests import Validate
from reconciled.config.model import ControllerConfig
from reconciled.config.positions import Path as Steps
from reconciled.config.positions import Place, Positions
from reconciled.config.structure import Structurer
from reconciled.config.trust import distrust, read_trusted
from reconciled.core.problems import Invalid, Problem
from reconciled.core.resources import Manifest, Origin
from reconciled.signal_state import SignalState

T = TypeVar("T")

GROUP = "reconciled.reconcilers"
# Known without a scan of everything that is installed, which would delay every start.
_BUILT_IN = {
    "exec": "reconciled.reconcilers.exec:ExecReconciler",
    "file": "reconciled.reconcilers.file:FileReconciler",
}
_ASYNC = ("reconcile", "remove", "plan", "observe", "undo")
# Decide from what they are given, so that they must not wait.
_PURE = ("recover", "budget", "not_built", "can_undo")


class NotFound(Exception):
    """No such reconciler; the message says which one was probably meant."""


class Broken(Exception):
    """A reconciler that exists and cannot be used: why, and where the fault lies."""

    def __init__(self, name: str, reason: str, origin: Origin) -> None:
        super().__init__(f"{origin}: reconciler {name} cannot be used: {reason}")
        self.name = name
        self.reason = reason
        self.origin = origin


@attrs.frozen(eq=False)
class Plugin:
    """A loaded reconciler class, with what it says about itself."""

    name: str  # as the configuration names it
    version: str
    origin: str  # the file it was loaded from
    cls: type[Reconciler[Any]]
    kind: str  # of the manifests it takes
    spec_class: type
    options_class: type | None
    warnings: tuple[str, ...] = ()
    _structurer: Structurer = attrs.field(factory=Structurer, repr=False)

    def spec(self, manifest: Manifest) -> Any:
        """The spec of *manifest* as the plugin's class. Raises Invalid, at the manifest."""
        origin = manifest.origin
        positions = Positions(origin.file, Place(origin.line, origin.column))
        return self.read(manifest.spec, positions, ("spec",))

    def read(self, spec: Mapping[str, Any], positions: Positions, path: Steps) -> Any:
        """*spec*, which stands at *path*, as the plugin's class. Raises Invalid."""
        return self._structurer.structure(self.spec_class, spec, positions, path)

    def options(self, controller: ControllerConfig) -> Any:
        """The options of *controller* as the plugin's class, or None. Raises Invalid."""
        path = (*controller.path, "options")
        options = dict(controller.options)
        if self.options_class is not None:
            return self._structurer.structure(
                self.options_class, options, controller.positions, path
            )
        if options:
            message = f"the reconciler {self.name} takes no options: remove them"
            raise Invalid([controller.positions.problem(path, message)])
        return None

    def problems(
        self, kind: str, spec: Mapping[str, Any], positions: Positions, path: Steps
    ) -> list[Problem]:
        """What is wrong with *spec*; nothing where it is of another plugin's *kind*."""
        if kind != self.kind:
            return []
        try:
            self.read(spec, positions, path)
        except Invalid as exc:
            return exc.problems
        return []


def make_validator(*plugins: Plugin) -> Validate:
    """Checks specs against the classes of *plugins*; kinds of none of them pass."""

    def validate(
        kind: str, spec: Mapping[str, Any], positions: Positions, path: Steps
    ) -> list[Problem]:
        problems = [plugin.problems(kind, spec, positions, path) for plugin in plugins]
        # Two controllers with one reconciler would tell everything twice.
        return sorted({problem for part in problems for problem in part})

    return validate


@attrs.frozen
class Located:
    """Where a reconciler is: ``MODULE:CLASS`` of a package, or a class of a single file."""

    name: str
    target: str
    version: str
    file: Path | None = None

    def load(self) -> Plugin:
        """Import it and look at it; blocks. Raises Broken, and NotFound for its class."""
        before = SignalState.now()
        try:
            cls, origin = self._import()
            return self._described(cls, origin, tuple(before.restore()))
        finally:
            before.restore()

    def _import(self) -> tuple[Any, str]:
        module_name, _, class_name = self.target.partition(":")
        module: types.ModuleType
        if self.file is None:
            module = self._isolated(lambda: importlib.import_module(module_name))
        else:
            module = self._import_file(self.file)
        found: Any = module
        for part in class_name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise NotFound(_no_class(self.name, module, class_name))
        return found, str(getattr(module, "__file__", module_name))

    def _import_file(self, path: Path) -> types.ModuleType:
        try:
            reason = distrust(path.parent, path.parent.stat())
            if reason is not None:
                raise ValueError(f"its directory {reason}")  # noqa: TRY301 - one place turns refusals into Broken
            source = read_trusted(path)
        except (OSError, ValueError) as exc:
            raise Broken(self.name, str(exc), Origin(str(path))) from exc
        digest = hashlib.sha256(bytes(path) + b"\0" + source).hexdigest()[:16]
        module = types.ModuleType(f"reconciled_plugin_{path.stem}_{digest}")
        module.__file__ = str(path)
        # attrs and pickle look a class's module up by its name.
        previous = sys.modules.get(module.__name__)
        sys.modules[module.__name__] = module

        def execute() -> types.ModuleType:
            exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))  # noqa: S102 - that is what a plugin is
            return module

        try:
            return self._isolated(execute)
        except Broken:
            del sys.modules[module.__name__]
            if previous is not None:
                sys.modules[module.__name__] = previous
            raise

    def _isolated(self, call: Callable[[], T]) -> T:
        """The result of *call*, which runs the plugin's code; whatever it raises is Broken."""
        try:
            return call()
        except trio.Cancelled:
            raise
        except BaseException as exc:
            # SystemExit and KeyboardInterrupt too: signals never raise here, so they are its own.
            place = _origin_of(exc, self.file)
            raise Broken(self.name, _told(exc), place) from exc

    def _described(self, cls: Any, origin: str, warnings: tuple[str, ...]) -> Plugin:
        def look() -> tuple[str, type, type | None]:
            return _look(cls)

        kind, spec, options = self._isolated(look)
        return Plugin(self.name, self.version, origin, cls, kind, spec, options, warnings)


def find(name: str, directories: Sequence[Path] = ()) -> Located:
    """Where the reconciler *name* is. Raises NotFound; imports nothing.

    *name* is an entry point, or FILE_STEM:Class for a file in one of *directories*.
    """
    if name in _BUILT_IN:
        return Located(name, _BUILT_IN[name], _own_version())
    stem, colon, class_name = name.partition(":")
    if colon:
        return _find_file(name, stem, class_name, directories)
    points = importlib.metadata.entry_points(group=GROUP)
    for point in points:
        if point.name == name:
            return Located(name, point.value, point.dist.version if point.dist else "unknown")
    known = {*_BUILT_IN, *(point.name for point in points)}
    close = guess(name, known)
    if close is not None:
        raise NotFound(f"no reconciler {name}: did you mean {close}?")
    if any((directory / f"{name}.py").is_file() for directory in directories):
        raise NotFound(f"no reconciler {name}: for its file write {name}:CLASS")
    raise NotFound(
        f"no reconciler {name}: there are {', '.join(sorted(known))}; "
        "install the package that has it, or write FILE:CLASS for a file in a plugin directory"
    )


def _own_version() -> str:
    try:
        return importlib.metadata.version("reconciled")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a tree that is not installed


def _find_file(name: str, stem: str, class_name: str, directories: Sequence[Path]) -> Located:
    if not stem.replace("-", "_").isidentifier() or not class_name.isidentifier():
        raise NotFound(f"{name} is no reconciler: write FILE:CLASS, the file without .py")
    files = [directory / f"{stem}.py" for directory in directories]
    present = [file for file in files if file.is_file()]
    if len(present) > 1:
        raise NotFound(f"{name} is in two plugin directories: {present[0]} and {present[1]}")
    if present:
        return Located(name, f"{stem}:{class_name}", "file", present[0])
    if not directories:
        raise NotFound(f"no reconciler {name}: plugins.directories names no directory")
    stems = {file.stem for directory in directories for file in directory.glob("*.py")}
    close = guess(stem, stems)
    if close is not None:
        raise NotFound(f"no plugin file {stem}.py: did you mean {close}:{class_name}?")
    raise NotFound(f"no plugin file {stem}.py in {', '.join(map(str, directories))}")


def _no_class(name: str, module: types.ModuleType, wanted: str) -> str:
    classes = [
        found
        for found, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Reconciler) and value is not Reconciler
    ]
    close = guess(wanted, classes)
    hint = f"did you mean {close}?" if close else f"it has {', '.join(classes) or 'none'}"
    return f"no reconciler {name}: {module.__file__} has no class {wanted}: {hint}"


def _look(cls: Any) -> tuple[str, type, type | None]:
    """The kind, spec class and options class of *cls*. Raises TypeError for what is no use."""
    if not isinstance(cls, type) or not issubclass(cls, Reconciler):
        raise TypeError("it is no subclass of reconciled.api.Reconciler")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise TypeError(f"it lacks the method {', '.join(missing)}")
    for method in (*_ASYNC, *_PURE):
        function = getattr(cls, method, None)
        if function is None or inspect.iscoroutinefunction(function) == (method in _ASYNC):
            continue
        if method in _ASYNC:
            raise TypeError(f"its method {method} is not async: write async def {method}")
        raise TypeError(f"its method {method} is async, and may not wait: write def {method}")
    spec = _spec_class(cls)
    if not isinstance(spec, type) or not attrs.has(spec):
        raise TypeError(
            "it names no attrs class as its spec: write class "
            f"{cls.__name__}(Reconciler[Spec]) with @attrs.frozen class Spec"
        )
    if cls.Options is not None and not attrs.has(cls.Options):
        raise TypeError("its Options are no attrs class: put @attrs.frozen above the class")
    kind = getattr(cls, "kind", spec.__name__)
    if not isinstance(kind, str) or not kind.isalnum():
        raise TypeError("its kind is no word of letters and digits")
    return kind, spec, cls.Options


def _spec_class(cls: type) -> Any:
    """What stands in the brackets of Reconciler[...], in *cls* or the nearest base that has it."""
    for base in cls.__mro__:
        for generic in vars(base).get("__orig_bases__", ()):
            origin = get_origin(generic)
            if not isinstance(origin, type) or not issubclass(origin, Reconciler):
                continue
            spec = get_args(generic)[0]
            if isinstance(spec, ForwardRef):
                spec = vars(sys.modules[base.__module__]).get(spec.__forward_arg__)
            if not isinstance(spec, TypeVar):
                return spec
    return None


def _told(exc: BaseException) -> str:
    if isinstance(exc, SystemExit):
        return f"its import tried to end the process (sys.exit({exc.code!r}))"
    if isinstance(exc, SyntaxError):
        return f"SyntaxError: {exc.msg}"
    return "".join(traceback.format_exception_only(exc)).strip()


def _origin_of(exc: BaseException, file: Path | None) -> Origin:
    """The line to look at: in the plugin's own file, else where it was raised."""
    if isinstance(exc, SyntaxError) and exc.filename:
        return Origin(exc.filename, exc.lineno or 1, exc.offset or 1)
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if file is not None and frame.filename == str(file)]
    frame = (own or frames)[-1]
    if frame.filename == __file__:
        return Origin(str(file) if file is not None else frame.filename)
    return Origin(frame.filename, frame.lineno or 1)
