"""Named arrays of a model, in a JSON or npz file of its version folder."""

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.tensors import Array
from weft.base.text.pbtxt import suggestion
from weft.serving.backends.base import ModelContext
from weft.serving.backends.loading import existing_file

_NUMERIC = "biuf"


class ArrayFile:
    """The arrays of one file; each is checked as it is read, and ``finish`` refuses those that were not read.

    ::

        JSON    {"standard": {"mean": [1.5, 2.0], "scale": [0.5, 1.0]}}
        npz     numpy.savez(path, **{"standard.mean": mean, "standard.scale": scale})

    Both have the names ``standard.mean`` and ``standard.scale``. In JSON null is NaN; pickled objects in an npz are
    refused. Every method raises InvalidArgumentError with the path, the name and what is allowed.
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
        """A list of strings, not empty."""
        value = self._value(name)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(value, list) or not value or not all(isinstance(element, str) for element in value):
            raise self._fault(name, "a list of at least one string", repr(value)[:80])
        return value

    def finish(self) -> None:
        """Refuse arrays that were not read, with the nearest known name."""
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
