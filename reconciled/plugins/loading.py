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
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from reconciled.api import Reconciler
from reconciled.config.model import ControllerConfig
from reconciled.config.structuring.faults import guess
from reconciled.config.structuring.structurer import Structurer
from reconciled.config.trusted_files import read_trusted, untrusted_reason
from reconciled.config.yaml.positions import Location, Positions
from reconciled.config.yaml.positions import Path as Steps
from reconciled.core.errors import Invalid, PluginBroken, PluginNotFound
from reconciled.core.resources import Manifest, Origin
from reconciled.plugins import contract
from reconciled.plugins.discovery import PluginLocation
from reconciled.plugins.signal_guard import SignalState

T = TypeVar("T")


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

    def spec_of(self, manifest: Manifest) -> Any:
        """The spec of *manifest* as an object of spec_class.

        It is the one that the manifest carries, else a new one: a manifest out of the store
        carries none, and one that was parsed before a reload may carry an object of the class
        that the reload replaced. Raises Invalid, at the manifest.
        """
        if type(manifest.typed_spec) is self.spec_class:
            return manifest.typed_spec
        origin = manifest.origin
        positions = Positions(origin.file, Location(origin.line, origin.column))
        return self.structure_spec(manifest.spec, positions, ("spec",))

    def structure_spec(self, spec: Mapping[str, Any], positions: Positions, path: Steps) -> Any:
        """*spec*, written at *path*, as a new object of spec_class. Raises Invalid."""
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


def load(located: PluginLocation) -> Plugin:
    """Import the reconciler at *located* and judge its class; blocks.

    Raises Broken for what is there and cannot be used, and NotFound for a class that is missing.
    """
    return _Loading(located).load()


@attrs.frozen
class _Loading:
    """The import of one reconciler. Raises Broken, and NotFound for a class that is missing."""

    located: PluginLocation

    def load(self) -> Plugin:
        """The plugin; an import leaves no trace in how signals are handled."""
        before = SignalState.capture()
        try:
            cls, origin = self._import()
            return self._described(cls, origin, tuple(before.restore()))
        finally:
            before.restore()

    def _import(self) -> tuple[Any, str]:
        module_name, _, class_name = self.located.target.partition(":")
        module: types.ModuleType
        if self.located.file is None:
            module = self._isolated(lambda: importlib.import_module(module_name))
        else:
            module = self._import_file(self.located.file)
        found: Any = module
        for part in class_name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise PluginNotFound(_no_class_message(self.located.name, module, class_name))
        return found, str(getattr(module, "__file__", module_name))

    def _import_file(self, path: Path) -> types.ModuleType:
        try:
            reason = untrusted_reason(path.parent, path.parent.stat())
            if reason is not None:
                raise ValueError(f"its directory {reason}")  # noqa: TRY301 - one place turns refusals into Broken
            source = read_trusted(path)
        except (OSError, ValueError) as exc:
            raise PluginBroken(self.located.name, str(exc), Origin(str(path))) from exc
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
        except PluginBroken:
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
            place = _origin_of(exc, self.located.file)
            raise PluginBroken(self.located.name, _describe_exception(exc), place) from exc

    def _described(self, cls: Any, origin: str, warnings: tuple[str, ...]) -> Plugin:
        def look() -> tuple[str, type, type | None]:
            return contract.judge(cls)

        kind, spec, options = self._isolated(look)
        return Plugin(
            self.located.name, self.located.version, origin, cls, kind, spec, options, warnings
        )


def _no_class_message(name: str, module: types.ModuleType, wanted: str) -> str:
    classes = [
        found
        for found, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Reconciler) and value is not Reconciler
    ]
    close = guess(wanted, classes)
    hint = f"did you mean {close}?" if close else f"it has {', '.join(classes) or 'none'}"
    return f"no reconciler {name}: {module.__file__} has no class {wanted}: {hint}"


def _describe_exception(exc: BaseException) -> str:
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
