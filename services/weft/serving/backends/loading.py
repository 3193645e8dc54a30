"""Helpers for ``load`` of backends: packages, files, declared tensors."""

import importlib
import importlib.util
import json
import os
import stat
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError
from weft.base.repository.layout import existing_file
from weft.base.signature import TensorSpec
from weft.base.tensors import Array
from weft.base.text.pbtxt import suggestion
from weft.serving.backends.base import Backend, ModelContext

Dims = tuple[int | None, ...]

#: Time that a load waits for the imports of another one, in seconds.
IMPORT_WAIT_S = 60.0

_import_lock = threading.RLock()


@contextmanager
def importing() -> Iterator[None]:
    """Hold the import lock while importing a model's code or a library.

    Instances load on separate threads, and large libraries break when another import sees them half initialised:
    ``import torch`` beside ``import sklearn`` failed once in some tens of starts with "operator ... does not exist". An
    import that takes longer than ``IMPORT_WAIT_S`` may hang, and no longer delays the others.
    """
    is_alone = _import_lock.acquire(timeout=IMPORT_WAIT_S)
    try:
        yield
    finally:
        if is_alone:
            _import_lock.release()


class LazyBackends(Mapping[str, type[Backend]]):
    """Backends by name, given as ``module:Class`` and imported on access: a process loads only what its models use."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> type[Backend]:
        module, _, attribute = self._places[name].partition(":")
        with importing():
            backend: type[Backend] = getattr(importlib.import_module(module), attribute)
        return backend

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # without an import


class MissingPackageError(UnavailableError):
    """A package that a backend needs cannot be imported here. UNAVAILABLE."""


def require(module: str, extra: str) -> Any:
    """Import a package that an extra of Weft installs. Raises MissingPackageError that names the extra."""
    try:
        with importing():
            return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module, str(error), extra) from error


def require_installed(module: str, extra: str) -> None:
    """As ``require``, without importing the package, which may take seconds."""
    if importlib.util.find_spec(module) is None:
        raise _missing(module, "it is not installed", extra)


def _missing(module: str, cause: str, extra: str) -> MissingPackageError:
    return MissingPackageError(f"cannot import '{module}': {cause}; install it with pip install 'weft-mesh[{extra}]'")


def why_unreadable(directory: Path) -> str:
    """Name the first file or folder of a model that this process may not read, and the cure; "" if there is none.

    Libraries report such files misleadingly: safetensors says that the file does not exist.
    """
    if not directory.exists():
        return ""
    for path in (directory, *sorted(directory.rglob("*"))):
        wanted = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
        if path.exists() and not os.access(path, wanted):  # of a link that leads nowhere, who needs it speaks
            found = path.stat()
            return (
                f"permission denied: {path} has mode {stat.S_IMODE(found.st_mode):04o} and is of user {found.st_uid}, "
                f"this service runs as user {os.geteuid()}; chmod -R a+rX {directory}"
            )
    return ""


def model_file(model: ModelContext, default: str) -> Path:
    """Path of the model's file in the version folder: ``default_model_filename``, else ``default``."""
    try:
        return existing_file(model.directory, model.config.get("default_model_filename") or default)
    except NotFoundError as error:
        cure = "put it there, or name another one as default_model_filename in config.pbtxt"
        raise NotFoundError(f"{error.message}; {cure}") from None


def check_tensor(model: ModelContext, spec: TensorSpec, datatypes: Sequence[str], dims: Dims) -> TensorSpec:
    """Return ``spec`` if it has one of ``datatypes`` (V2 names) and ``dims`` (no batch; None: any size), else raise."""
    fits = len(spec.dims) == len(dims) and all(want in (None, got) for want, got in zip(dims, spec.dims, strict=True))
    if spec.datatype not in datatypes or not fits:
        allowed = f"{' or '.join(datatypes)} [{', '.join('any' if dim is None else str(dim) for dim in dims)}]"
        text = f"'{spec.name}' must be {allowed}, got {spec.datatype} {list(spec.dims)}"
        raise model.error(_path_of(model, spec), text)
    return spec


def _path_of(model: ModelContext, spec: TensorSpec) -> str:
    for kind, specs in (("input", model.signature.inputs), ("output", model.signature.outputs)):
        if spec in specs:
            return f"{kind}[{specs.index(spec)}]"
    return ""


def only_input(model: ModelContext, datatypes: Sequence[str], dims: Dims) -> TensorSpec:
    """The one declared input, checked by ``check_tensor``. Raises InvalidArgumentError unless there is exactly one."""
    inputs = model.signature.inputs
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs)
        raise model.fault("input", f"model '{model.signature.name}' must have exactly one input, got {names or 'none'}")
    if inputs[0].is_optional:
        raise model.error("input[0]", "its only input must not be optional")
    return check_tensor(model, inputs[0], datatypes, dims)


def outputs_among(model: ModelContext, allowed: Mapping[str, tuple[Sequence[str], Dims]]) -> Mapping[str, TensorSpec]:
    """The declared outputs by name, each checked by ``check_tensor``; ``allowed`` has names, datatypes and dims."""
    for spec in model.signature.outputs:
        if spec.name not in allowed:
            text = f"unknown output '{spec.name}'; use some of {', '.join(allowed)}"
            raise model.error(_path_of(model, spec), text)
        check_tensor(model, spec, *allowed[spec.name])
    return {spec.name: spec for spec in model.signature.outputs}


_NUMERIC = "biuf"


class ArrayFile:
    """The arrays of one file; each is checked as it is read, and ``finish`` rejects those that were not read.

    ::

        JSON    {"standard": {"mean": [1.5, 2.0], "scale": [0.5, 1.0]}}
        npz     numpy.savez(path, **{"standard.mean": mean, "standard.scale": scale})

    In JSON null is NaN; pickled objects in an npz are rejected. Every method raises InvalidArgumentError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrays = _read_npz(path) if path.suffix == ".npz" else _read_json(path)
        self._known: list[str] = []

    def __contains__(self, name: str) -> bool:
        """Whether the file has the array, which then counts as known."""
        self._known.append(name)
        return name in self._arrays

    def numbers(self, name: str, shape: tuple[int, ...], *, may_be_nan: bool = False) -> Array:
        """Numbers of ``shape``, float64, finite or (``may_be_nan``) NaN; -1 in the shape is any size of at least 1."""
        value = self._value(name)
        try:
            array = np.asarray(value)
            array = (array if array.dtype.kind in _NUMERIC else np.array(value, np.float64)).astype(np.float64)
        except (TypeError, ValueError):
            raise self._fault(name, "numbers", "something else") from None
        fits = array.ndim == len(shape) and all(
            want == got or (want == -1 and got) for want, got in zip(shape, array.shape, strict=True)
        )
        if not fits:
            wanted = f"numbers of shape [{', '.join('any' if dim == -1 else str(dim) for dim in shape)}]"
            raise self._fault(name, wanted, f"shape {list(array.shape)}")
        is_good = ~np.isinf(array) if may_be_nan else np.isfinite(array)
        if not is_good.all():
            raise self._fault(name, "finite numbers", f"{array[~is_good][0]}")
        return array

    def strings(self, name: str) -> list[str]:
        """A non-empty list of strings."""
        value = self._value(name)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(value, list) or not value or not all(isinstance(element, str) for element in value):
            raise self._fault(name, "a list of at least one string", repr(value)[:80])
        return value

    def finish(self) -> None:
        """Reject arrays that were not read, suggesting the nearest known name."""
        for name in sorted(set(self._arrays) - set(self._known)):
            raise InvalidArgumentError(f"{self.path}: unknown '{name}'{suggestion(name, self._known)}")

    def _value(self, name: str) -> Any:
        if name not in self:
            found = ", ".join(sorted(self._arrays)) or "nothing"
            raise InvalidArgumentError(f"{self.path} has no '{name}'; it has {found}")
        return self._arrays[name]

    def _fault(self, name: str, allowed: str, got: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.path}: '{name}' must be {allowed}, got {got}")


def array_file(model: ModelContext, stem: str) -> ArrayFile:
    """``default_model_filename``, else ``<stem>.json`` or ``.npz``. Raises NotFoundError or InvalidArgumentError."""
    named = model.config.get("default_model_filename")
    if not named:
        found = [name for name in (f"{stem}.json", f"{stem}.npz") if (model.directory / name).is_file()]
        if len(found) > 1:
            raise InvalidArgumentError(f"{model.directory} has both {found[0]} and {found[1]}; remove one of them")
        if not found:
            raise NotFoundError(f"{model.directory} has no file '{stem}.json' or '{stem}.npz'")
        named = found[0]
    path = existing_file(model.directory, named)
    if path.suffix not in (".json", ".npz"):
        raise model.fault("default_model_filename", f"'{named}' must end in .json or .npz")
    return ArrayFile(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path} must hold an object, got {type(content).__name__}")
    return dict(_flattened(content, ""))


def _flattened(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(f"{path} is not an npz file of plain arrays: {error}") from error
