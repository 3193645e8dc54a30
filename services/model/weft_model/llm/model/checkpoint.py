"""The tensors in the safetensors files of a Hugging Face folder."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from weft_common.errors import InvalidArgumentError, NotFoundError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX = ".safetensors"
#: Types that become weights; packed and 8-bit ones would need their scales.
_DTYPES = ("F64", "F32", "F16", "BF16")
_NUM_NAMED = 5


class Checkpoint:
    """Open safetensors files: names, shapes, and each tensor when it is asked for. Made by ``open``.

    Args:
        files: Which open file has each tensor, and that file's name.
    """

    def __init__(self, files: dict[str, tuple[Any, str]]) -> None:
        self._files = files

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """The tensors of a folder; its files are closed at the end of the ``with`` statement.

        Args:
            path: Folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and the files that it
                names. The first is taken if both are there.

        Raises:
            NotFoundError: There is neither, or a file that the index names is not there.
            InvalidArgumentError: The index is not one, names a file outside of the folder or a tensor that is not where
                it says; or a file is torn.
        """
        with ExitStack() as stack:
            index = {} if (path / _SINGLE).is_file() else _read_index(path)
            handles = {
                name: stack.enter_context(_open(path / name)) for name in sorted(set(index.values())) or [_SINGLE]
            }
            files = {}
            for name, handle in handles.items():
                files.update(dict.fromkeys(handle.keys(), (handle, name)))
            for tensor, name in index.items():
                if files.get(tensor, (None, ""))[1] != name:
                    raise InvalidArgumentError(
                        f"{path / _INDEX} says that '{tensor}' is in {name}, and it is not; index and files are not of "
                        f"the same model: fetch the folder again"
                    )
            yield cls(files)

    def check(self, wanted: dict[str, tuple[int, ...]], ignored: Iterable[str]) -> None:
        """Hold names, shapes and types against what the model wants, before any data is read.

        Args:
            wanted: Shape of every tensor that must be there.
            ignored: Names that may be there as well.

        Raises:
            InvalidArgumentError: Tensors are missing, surplus, or not of the shape or type wanted.
        """
        cure = "config.json and the weights are of different models"
        if missing := sorted(wanted.keys() - self._files):
            raise InvalidArgumentError(f"weights: {_listed(missing)} missing; {cure}, or a file was left out")
        if surplus := sorted(self._files.keys() - wanted - set(ignored)):
            raise InvalidArgumentError(f"weights: {_listed(surplus)} not part of the model; {cure}")
        for name, shape in wanted.items():
            handle, file = self._files[name]
            tensor = handle.get_slice(name)
            if (got := tuple(tensor.get_shape())) != shape:
                raise InvalidArgumentError(
                    f"weights: '{name}' in {file} must have shape {list(shape)}, got {list(got)}; {cure}"
                )
            if (dtype := tensor.get_dtype()) not in _DTYPES:
                raise InvalidArgumentError(
                    f"weights: '{name}' in {file} must have one of the types {', '.join(_DTYPES)}, got {dtype}; take "
                    f"the model before it was quantised"
                )

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name``, on the CPU, as stored; a copy of its own.

        Raises:
            InvalidArgumentError: Its file cannot be read.
        """
        handle, file = self._files[name]
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InvalidArgumentError(f"weights: cannot read '{name}' of {file}: {error}") from error
        return tensor


def _read_index(path: Path) -> dict[str, str]:
    try:
        parsed = json.loads((path / _INDEX).read_bytes())
    except FileNotFoundError as error:
        pickles = " Pickled weights (*.bin, *.pt) can run code and are not read; save them as safetensors."
        has_pickles = any(file.suffix in (".bin", ".pt", ".pth") for file in path.glob("*"))
        raise NotFoundError(f"no {_SINGLE} or {_INDEX} in {path}.{pickles if has_pickles else ''}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path / _INDEX} is not JSON: {error}") from error
    index = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise InvalidArgumentError(f"{path / _INDEX} must have 'weight_map' with a file name for each tensor")
    for tensor, name in index.items():
        # A name with a folder in it, in any system's spelling, could read files outside of the model's folder.
        if PurePosixPath(name).name != name or "\\" in name or ":" in name or not name.endswith(_SUFFIX):
            raise InvalidArgumentError(
                f"{path / _INDEX}: '{tensor}' must be in a {_SUFFIX} file of the same folder, got {name!r}"
            )
    return index


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise NotFoundError(f"no file {path}, which {_INDEX} names; fetch the folder again") from error
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise InvalidArgumentError(
            f"{path} ({size} bytes) is torn or no safetensors file: {error}; fetch it again"
        ) from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    verb = "is" if len(names) == 1 else "are"
    return f"{', '.join(repr(name) for name in names[:_NUM_NAMED])}{more} {verb}"
