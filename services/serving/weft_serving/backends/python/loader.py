"""Imports a ``model.py`` so that no two models, and no two instances, share a module.

Each load is a package of its own, whose folders are the version folder and the model's folder. ``import helper`` inside
it finds ``helper.py`` there, as it does under Triton Inference Server; like there, what is installed comes first.
"""

import builtins
import importlib
import importlib.util
import itertools
import sys
import traceback
from collections.abc import Mapping, Sequence
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
from typing import Any

from weft_common.errors import InvalidArgumentError
from weft_serving.backends.loading import importing
from weft_serving.backends.python import pb_utils

_PREFIX = "weft_python_model_"
_UTILS = "triton_python_backend_utils"
_numbers = itertools.count()


def load_module(path: Path, utils: ModuleType = pb_utils) -> ModuleType:
    """Execute the module at ``path``, for example ``<model>/1/model.py``.

    Args:
        path: Of the file.
        utils: The module that it imports as ``triton_python_backend_utils``.

    Raises:
        InvalidArgumentError: It does not import; the message has the file and the line.
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
        raise InvalidArgumentError(f"{path} cannot be imported: {describe(error, path.parent.parent)}") from error


def unload_module(module: ModuleType) -> None:
    """Remove a module of ``load_module`` and everything that it imported from its folders."""
    package = module.__name__.partition(".")[0]
    for name in [name for name in list(sys.modules) if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


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
        """Run the file."""
        own = {"__import__": _importer(module.__name__.partition(".")[0]), "print": _print}
        module.__dict__["__builtins__"] = vars(builtins) | own
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules of the packages that ``load_module`` makes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Source or extension module in the package's folders."""
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
    """An ``__import__`` that searches ``package`` for modules that are not installed."""

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,  # the names of builtins.__import__
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        top = f"{package}.{name.partition('.')[0]}"
        if level or top not in sys.modules:
            try:
                return builtins.__import__(name, globals, locals, fromlist, level)
            except ModuleNotFoundError as error:
                if level or error.name != name.partition(".")[0] or importlib.util.find_spec(top) is None:
                    raise
        return builtins.__import__(name, {"__package__": package}, None, fromlist, 1)

    return import_


def _print(*values: object, **options: Any) -> None:
    """``print`` to standard error: standard output belongs to the service."""
    options.setdefault("file", sys.stderr)
    print(*values, **options)  # noqa: T201  # this is the print of models
