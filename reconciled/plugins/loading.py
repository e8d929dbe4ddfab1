"""Loads reconcilers, and contains the faults of their imports.

1. A class that does not exist is PluginNotFound: the configuration is invalid. One that exists
   and cannot be used is PluginBroken: it stalls its own controller and nothing else, whatever
   its import raised.
2. A plugin that is a single file is read at each load and becomes a separate module, so that a
   reload gets the current file, and unfinished runs keep the classes with which they started.
   Packages are imported once per process, as Python does; a change of one needs a restart.
3. Signal handling is the same after an import as before it: a stop depends on it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
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
from reconciled.core.errors import ContractBroken, Invalid, PluginBroken, PluginNotFound
from reconciled.core.resources import Manifest, Origin
from reconciled.plugins import contract
from reconciled.plugins.discovery import PluginLocation
from reconciled.plugins.signal_guard import SignalState

T = TypeVar("T")


@attrs.frozen(eq=False)
class Plugin:
    """A loaded reconciler class, with its kind, spec class and options class."""

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
        """The spec of *manifest* as an object of spec_class. Raises Invalid, at the manifest.

        The object that the manifest carries, if it is of this class; else a new one. A manifest
        from the store carries none, and one that was parsed before a reload may carry an object
        of the class that the reload replaced.
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
    """Import the reconciler at *located* and check its class. Blocks.

    Raises PluginNotFound if the class does not exist, and PluginBroken if it cannot be used.
    """
    return _Loading(located).load()


@attrs.frozen
class _Loading:
    """The import of one reconciler; see load()."""

    located: PluginLocation

    def load(self) -> Plugin:
        """The plugin. Restores signal handling, whatever the import did."""
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
                raise ValueError(f"its directory {reason}")  # noqa: TRY301 - one handler makes refusals PluginBroken
            source = read_trusted(path)
        except (OSError, ValueError) as exc:
            raise PluginBroken(self.located.name, str(exc), Origin(str(path))) from exc
        digest = hashlib.sha256(bytes(path) + b"\0" + source).hexdigest()[:16]
        module = types.ModuleType(f"reconciled_plugin_{path.stem}_{digest}")
        module.__file__ = str(path)
        # attrs and pickle find a class's module by name in sys.modules.
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
        """The result of *call*, which runs plugin code; what it raises becomes PluginBroken."""
        try:
            return call()
        except (trio.Cancelled, ContractBroken):
            raise
        except BaseException as exc:
            # SystemExit and KeyboardInterrupt too: signal handlers never raise them here.
            origin = _origin_of(exc, self.located.file)
            raise PluginBroken(self.located.name, _describe_exception(exc), origin) from exc

    def _described(self, cls: Any, origin: str, warnings: tuple[str, ...]) -> Plugin:
        try:
            kind, spec, options = self._isolated(lambda: contract.check_class(cls))
        except ContractBroken as exc:
            line = self._isolated(lambda: _line_of(cls))
            raise PluginBroken(self.located.name, str(exc), Origin(origin, line)) from exc
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
    hint = f"did you mean {close}?" if close else f"its reconcilers: {', '.join(classes) or 'none'}"
    return f"no reconciler {name}: {module.__file__} has no class {wanted}: {hint}"


def _describe_exception(exc: BaseException) -> str:
    if isinstance(exc, SystemExit):
        return f"its import called sys.exit({exc.code!r})"
    if isinstance(exc, SyntaxError):
        return f"SyntaxError: {exc.msg}"
    return "".join(traceback.format_exception_only(exc)).strip()


def _line_of(cls: Any) -> int:
    """The line at which *cls* is defined; 1 if it is not a class or has no source."""
    try:
        return inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):
        return 1


def _origin_of(exc: BaseException, file: Path | None) -> Origin:
    """The last line of the plugin's own file in the traceback, else where *exc* was raised."""
    if isinstance(exc, SyntaxError) and exc.filename:
        return Origin(exc.filename, exc.lineno or 1, exc.offset or 1)
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if file is not None and frame.filename == str(file)]
    frame = (own or frames)[-1]
    if frame.filename == __file__:
        return Origin(str(file) if file is not None else frame.filename)
    return Origin(frame.filename, frame.lineno or 1)
