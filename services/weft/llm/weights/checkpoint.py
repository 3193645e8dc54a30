"""Reader of the safetensors files of a Hugging Face folder."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.llm.weights.parts import listed, read_object

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX = ".safetensors"
#: Types of weights that are not quantised, as safetensors names them.
FLOATS = ("F64", "F32", "F16", "BF16")


class StoredTensor(NamedTuple):
    """What a tensor of a file is, or has to be.

    Attributes:
        shape: Its dimensions.
        dtypes: Its type as safetensors names it, or those that it may have.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


class Checkpoint:
    """Open safetensors files; reads each tensor on demand. Created by ``open``.

    Args:
        files: The open file that holds each tensor, and that file's name.
    """

    def __init__(self, files: dict[str, tuple[Any, str]]) -> None:
        self._files = files

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Open the checkpoint of a folder; leaving the ``with`` block closes its files.

        Args:
            path: Folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and the files that it
                names. The single file takes precedence.

        Raises:
            NotFoundError: Both are missing, or a file that the index names is.
            InvalidArgumentError: The index is malformed, names a file outside of the folder or a tensor that is not in
                the file it names; or a file is truncated.
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

    def find(self, name: str) -> StoredTensor | None:
        """Shape and type of the tensor ``name``; None where there is none."""
        if name not in self._files:
            return None
        tensor = self._files[name][0].get_slice(name)
        return StoredTensor(tuple(tensor.get_shape()), (tensor.get_dtype(),))

    def check(self, wanted: dict[str, StoredTensor], ignored: Iterable[str]) -> None:
        """Validate names, shapes and types against those of the model, before any data is read.

        Args:
            wanted: Shape and possible types of every required tensor.
            ignored: Names that may be present as well.

        Raises:
            InvalidArgumentError: Tensors are missing, unexpected, or of another shape or type.
        """
        cure = "config.json and the weights are of different models"
        if missing := sorted(wanted.keys() - self._files):
            raise InvalidArgumentError(f"weights: {listed(missing)} missing; {cure}, or a file was left out")
        if surplus := sorted(self._files.keys() - wanted - set(ignored)):
            raise InvalidArgumentError(f"weights: {listed(surplus)} not part of the model; {cure}")
        for name, (shape, dtypes) in wanted.items():
            handle, file = self._files[name]
            tensor = handle.get_slice(name)
            if (got := tuple(tensor.get_shape())) != shape:
                raise InvalidArgumentError(
                    f"weights: '{name}' in {file} must have shape {list(shape)}, got {list(got)}; {cure}"
                )
            if (dtype := tensor.get_dtype()) not in dtypes:
                quantised = "; config.json does not say how it is quantised" if dtypes == FLOATS else ""
                raise InvalidArgumentError(
                    f"weights: '{name}' in {file} must have one of the types {', '.join(dtypes)}, got {dtype}"
                    f"{quantised}; fetch the folder again, or take the model before it was quantised"
                )

    def read(self, name: str) -> torch.Tensor:
        """Copy the tensor ``name`` to the CPU, with its stored type.

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
    parsed = read_object(path / _INDEX)
    if parsed is None:
        pickles = " Pickled weights (*.bin, *.pt) can run code and are not read; save them as safetensors."
        has_pickles = any(file.suffix in (".bin", ".pt", ".pth") for file in path.glob("*"))
        raise NotFoundError(f"no {_SINGLE} or {_INDEX} in {path}.{pickles if has_pickles else ''}")
    index = parsed.get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise InvalidArgumentError(f"{path / _INDEX} must have 'weight_map' with a file name for each tensor")
    for tensor, name in index.items():
        # Path traversal: a name with a directory, in any system's syntax, could read files outside of the folder.
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
