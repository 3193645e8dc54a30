"""Imports a ``model.py`` so that no two models, and no two instances, share a module.

Each load is a package of its own, whose folders are the version folder and the model's folder. ``import helper`` inside
it finds ``helper.py`` there, as it does under Triton Inference Server; like there, what is installed comes first.
"""

import ast
import builtins
import importlib
import importlib.util
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn, TypeVar

from weft.base.core import InferCall
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.observing.failures import caused_by
from weft.serving.backends.base import MetricSink, ModelCaller, RepositoryControl
from weft.serving.backends.loading import importing
from weft.serving.backends.python import pb_utils
from weft.serving.backends.python.pb_utils import ModelConfig
from weft.serving.backends.python.requests import InferenceRequest
from weft.serving.backends.python.responses import TritonModelException
from weft.serving.request.request import InferenceRequest as ServedRequest

COMPLETER = "auto_complete_config"

_CLASS = "TritonPythonModel"
#: Names with which a module can define others that its text does not show.
_DYNAMIC = {"globals", "vars", "locals", "exec", "setattr", "__getattr__"}
_PREFIX = "weft_python_model_"
_UTILS = "triton_python_backend_utils"
_numbers = itertools.count()
_ResultT = TypeVar("_ResultT")


def utils_of(
    directory: Path,
    caller: ModelCaller | None = None,
    origin: str = "",
    model: str = "",
    metrics: MetricSink | None = None,
    control: RepositoryControl | None = None,
) -> ModuleType:
    """The module as one loaded model, of the version folder ``directory``, imports it."""
    module = ModuleType("triton_python_backend_utils", __doc__)
    own: dict[str, Any] = {"get_model_dir": lambda: str(directory)}
    for base, fields in (
        (InferenceRequest, {"_caller": caller, "_origin": origin}),
        (pb_utils.MetricFamily, {"_sink": metrics, "_owner": origin}),
        (pb_utils.Logger, {"model": model}),
    ):
        own[base.__name__] = type(base.__name__, (base,), fields)
    if control is not None:
        own |= _model_loading(control, model)
    vars(module).update({key: value for key, value in vars(pb_utils).items() if not key.startswith("_")} | own)
    vars(module)["__getattr__"] = pb_utils.__getattr__
    return module


def _model_loading(control: RepositoryControl, model: str) -> dict[str, Callable[..., Any]]:

    def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        _done(control.load(model, model_name, {**({"config": config} if config else {}), **(files or {})}))

    def unload_model(model_name: str, unload_dependents: bool = False) -> None:
        _done(control.unload(model, model_name, unload_dependents=unload_dependents))

    def is_model_ready(model_name: str, model_version: str = "") -> bool:
        return _done(control.is_ready(model_name, model_version))

    return {"load_model": load_model, "unload_model": unload_model, "is_model_ready": is_model_ready}


def _done(future: "Future[_ResultT]") -> _ResultT:
    try:
        return future.result()
    except WeftError as error:
        raise TritonModelException(error.message) from None
    except CancelledError:
        raise TritonModelException("the service is stopping; it loads and unloads no models") from None


class NothingInline:
    """The ``ModelCaller`` and ``RepositoryControl`` of a model that executes on the event loop: it refuses all."""

    def infer(self, call: InferCall, parents: Sequence[ServedRequest], origin: str) -> NoReturn:
        """Refused."""
        raise self._refusal(f"call model '{call.model_name}'")

    stream = infer

    def load(self, asker: str, name: str, parameters: Mapping[str, Any]) -> NoReturn:
        """Refused."""
        raise self._refusal(f"load model '{name}'")

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> NoReturn:
        """Refused."""
        raise self._refusal(f"unload model '{name}'")

    def is_ready(self, name: str, version: str) -> NoReturn:
        """Refused."""
        raise self._refusal(f"ask for model '{name}'")

    def _refusal(self, what: str) -> TritonModelException:
        return TritonModelException(
            f"a model with the parameter EXECUTION inline cannot {what}: it executes on the event loop, which would "
            "wait for itself; remove the parameter"
        )


def load_module(path: Path, utils: ModuleType = pb_utils) -> ModuleType:
    """Execute the module at ``path``, for example ``<model>/1/model.py``, which imports ``utils``.

    Raises InvalidArgumentError, with the file and the line, if it does not import.
    """
    sys.modules[_UTILS] = pb_utils
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    package = ModuleType(f"{_PREFIX}{next(_numbers)}")
    package.__path__ = [str(path.parent), str(path.parent.parent)]
    sys.modules[package.__name__] = package
    sys.modules[f"{package.__name__}.{_UTILS}"] = utils
    try:
        with importing():
            return importlib.import_module(f"{package.__name__}.{path.stem}")
    except BaseException as error:
        unload_module(package)
        if not isinstance(error, Exception):
            raise
        failure = InvalidArgumentError(f"{path} cannot be imported: {describe(error, path.parent.parent)}")
        raise caused_by(failure, error) from error


def unload_module(module: ModuleType) -> None:
    """Remove a module of ``load_module`` and everything that it imported from its folders."""
    package = module.__name__.partition(".")[0]
    for name in sys.modules.copy():  # other models load meanwhile
        if name == package or name.startswith(f"{package}."):
            sys.modules.pop(name, None)


def check_source(path: Path, *, checks_imports: bool) -> None:
    """Raise InvalidArgumentError for what the text alone tells to fail when the module is imported; runs none of it.

    Of imports those count that precede any other statement, which might change where modules are found.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
        names = {*compile(tree, str(path), "exec", dont_inherit=True).co_names}
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise InvalidArgumentError(f"{path} cannot be imported: {describe(error, path.parent.parent)}") from error
    for statement in tree.body if checks_imports else ():
        if isinstance(statement, ast.Import):
            modules = [name.name for name in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            modules = [statement.module] if statement.module and not statement.level else []
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        else:
            break
        for name in modules:
            if not _is_importable(name.partition(".")[0], path):
                raise InvalidArgumentError(
                    f"{path} cannot be imported: {path}:{statement.lineno}: ModuleNotFoundError: No module named "
                    f"'{name.partition('.')[0]}'; install it where Weft is installed, or give EXECUTION_ENV_PATH"
                )
    imports = [statement for statement in tree.body if isinstance(statement, ast.ImportFrom)]
    has_star = any(name.name == "*" for statement in imports for name in statement.names)
    if _CLASS not in names and not has_star and not names & _DYNAMIC:
        raise _no_class(path)


def _is_importable(name: str, path: Path) -> bool:
    if name in (_UTILS, *sys.modules) or any(any(folder.glob(f"{name}*")) for folder in path.parents[:2]):
        return True
    return importlib.util.find_spec(name) is not None


def model_class_of(module: ModuleType, path: Path) -> Any:
    """The class of a module. Raises InvalidArgumentError where it is missing."""
    model_class = getattr(module, _CLASS, None)
    if model_class is None:
        raise _no_class(path)
    return model_class


def _no_class(path: Path) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path} has no class {_CLASS}; a Python model must define it")


def complete_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The configuration as ``auto_complete_config`` of the model completes it. Raises InvalidArgumentError."""
    directory = path.parent
    module = load_module(path, utils_of(directory, model=config.get("name", "")))
    try:
        complete = getattr(model_class_of(module, path), COMPLETER, None)
        if complete is None:
            return config
        completed = complete(ModelConfig(json.dumps(config)))
        if not isinstance(completed, ModelConfig):
            raise InvalidArgumentError(
                f"{path}: auto_complete_config must return the pb_utils.ModelConfig, got {type(completed).__name__}"
            )
        return completed.as_dict()
    except WeftError:
        raise
    except Exception as error:
        failure = InvalidArgumentError(f"auto_complete_config failed: {describe(error, directory.parent)}")
        raise caused_by(failure, error) from error
    finally:
        unload_module(module)


def describe(error: BaseException, folder: Path) -> str:
    """File, line, kind and text of an error; file and line are the last inside ``folder``."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(folder)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {error}"


class _Loader(SourceFileLoader):
    """Runs a source file with an ``import`` and a ``print`` that belong to its model."""

    def get_code(self, fullname: str) -> CodeType:
        """Code of the file as it is now; no byte code is kept, the repository may be read-only or edited."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        own = {"__import__": _importer(module.__name__.partition(".")[0]), "print": _print}
        module.__dict__["__builtins__"] = vars(builtins) | own
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules of the packages that ``load_module`` makes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None or not fullname.startswith(_PREFIX):
            return None
        details = (ExtensionFileLoader, EXTENSION_SUFFIXES), (_Loader, SOURCE_SUFFIXES)
        for folder in path:
            spec = FileFinder(folder, *details).find_spec(fullname)
            if spec is not None and spec.loader is not None:
                return spec
        return None


_FINDER = _Finder()


def _importer(package: str) -> Any:
    def is_own(first: str) -> bool:
        """Whether ``first`` is the model's: one is loaded, or elsewhere only a folder without code has that name."""
        top = f"{package}.{first}"
        if top in sys.modules:
            return True
        installed = sys.modules.get(first)
        spec = importlib.util.find_spec(first) if installed is None else getattr(installed, "__spec__", None)
        is_code = installed is not None if spec is None else bool(spec.origin) or not spec.submodule_search_locations
        return not is_code and importlib.util.find_spec(top) is not None

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,  # the names of builtins.__import__
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if level or not is_own(name.partition(".")[0]):
            return builtins.__import__(name, globals, locals, fromlist, level)
        return builtins.__import__(name, {"__package__": package}, None, fromlist, 1)

    return import_


def _print(*values: object, **options: Any) -> None:
    """``print`` to standard error: standard output belongs to the service."""
    options.setdefault("file", sys.stderr)
    print(*values, **options)  # noqa: T201  # this is the print of models
