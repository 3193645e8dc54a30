"""Helpers for ``load`` of backends: packages, files, declared tensors."""

import importlib
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError
from weft.base.signature import TensorSpec
from weft.serving.backends.base import Backend, ModelContext

Dims = tuple[int | None, ...]

#: Time that a load waits for the imports of another one, in seconds.
IMPORT_WAIT_S = 60.0

_import_lock = threading.RLock()


@contextmanager
def importing() -> Iterator[None]:
    """Import the code of a model, or a library, while no other model does.

    Instances load on threads of their own, and large libraries break when another import sees them half initialised:
    ``import torch`` beside ``import sklearn`` failed once in some tens of starts with "operator ... does not exist". An
    import that takes longer than ``IMPORT_WAIT_S`` may hang, and does not delay the others.
    """
    is_alone = _import_lock.acquire(timeout=IMPORT_WAIT_S)
    try:
        yield
    finally:
        if is_alone:
            _import_lock.release()


class LazyBackends(Mapping[str, type[Backend]]):
    """Backends by name from ``module:Class``, imported when read: a process loads only what its models use."""

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


def require(module: str, extra: str) -> Any:
    """Import a package, of an extra of Weft's distribution, with the first model that needs it, or UnavailableError."""
    try:
        with importing():
            return importlib.import_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"cannot import '{module}': {error}; install it with pip install 'weft-mesh[{extra}]'"
        ) from error


def existing_file(directory: Path, filename: str, *, parents: Sequence[Path] = ()) -> Path:
    """Path of ``filename`` in the first folder that has it. Raises InvalidArgumentError (outside) or NotFoundError."""
    if PurePath(filename).is_absolute() or ".." in PurePath(filename).parts:
        raise InvalidArgumentError(f"file name '{filename}' leaves {directory}; give a name inside that folder")
    for folder in (directory, *parents):
        if (path := folder / filename).is_file():
            return path
    found = sorted(entry.name for entry in directory.iterdir())
    raise NotFoundError(f"{directory} has no file '{filename}'; it has {', '.join(found) or 'no files'}")


def why_unreadable(directory: Path) -> str:
    """The first file or folder of a model that this process may not read, and the cure; "" where there is none.

    Libraries tell of such a file in their own ways: safetensors says that it does not exist.
    """
    if not directory.exists():
        return ""
    for path in (directory, *sorted(directory.rglob("*"))):
        wanted = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
        if not os.access(path, wanted):
            found = path.stat()
            return (
                f"permission denied: {path} has mode {stat.S_IMODE(found.st_mode):04o} and is of user {found.st_uid}, "
                f"this service runs as user {os.geteuid()}; chmod -R a+rX {directory}"
            )
    return ""


def model_file(model: ModelContext, default: str) -> Path:
    """Path of the model's file in the version folder: ``default_model_filename``, else ``default``."""
    return existing_file(model.directory, model.config.get("default_model_filename") or default)


def check_tensor(model: ModelContext, spec: TensorSpec, datatypes: Sequence[str], dims: Dims) -> TensorSpec:
    """Return ``spec`` if it has one of ``datatypes`` (V2 names) and ``dims`` (no batch; None: any size), else raise."""
    fits = len(spec.dims) == len(dims) and all(want in (None, got) for want, got in zip(dims, spec.dims, strict=True))
    if spec.datatype not in datatypes or not fits:
        allowed = f"{' or '.join(datatypes)} [{', '.join('any' if dim is None else str(dim) for dim in dims)}]"
        raise model.fault(
            _path_of(model, spec),
            f"model '{model.signature.name}': '{spec.name}' must be {allowed}, got {spec.datatype} {list(spec.dims)}",
        )
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
        raise model.fault("input[0]", f"model '{model.signature.name}': its only input must not be optional")
    return check_tensor(model, inputs[0], datatypes, dims)


def outputs_among(model: ModelContext, allowed: Mapping[str, tuple[Sequence[str], Dims]]) -> Mapping[str, TensorSpec]:
    """The declared outputs by name, each checked by ``check_tensor`` against its datatypes and dims in ``allowed``.

    Raises InvalidArgumentError, also for an output of another name.
    """
    for spec in model.signature.outputs:
        if spec.name not in allowed:
            raise model.fault(
                _path_of(model, spec),
                f"model '{model.signature.name}': unknown output '{spec.name}'; use some of {', '.join(allowed)}",
            )
        check_tensor(model, spec, *allowed[spec.name])
    return {spec.name: spec for spec in model.signature.outputs}


def read_label_file(directory: Path, filename: str) -> tuple[Path, list[bytes]]:
    """The path of the file, and its lines, one label each, as bytes of UTF-8.

    The model's folder comes first, as in Triton Inference Server, then ``directory``, the version's, for labels that
    change with it. Raises as ``existing_file``, and OSError.
    """
    path = existing_file(directory.parent, filename, parents=(directory,))
    return path, path.read_bytes().removesuffix(b"\n").replace(b"\r\n", b"\n").split(b"\n")
