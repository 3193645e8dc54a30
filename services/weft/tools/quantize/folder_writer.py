"""Writer of a Hugging Face folder, which appears whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.base.errors import AlreadyExistsError, NotFoundError

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_SHARD_BYTES = 2**31


class FolderWriter:
    """Writes into a hidden folder beside ``output``, which ``finish`` renames; leaving the ``with`` block removes it.

    Args:
        output: Does not exist; the folder that it is in does.
        source: Folder whose other files are copied.

    Raises:
        AlreadyExistsError: ``output`` exists.
        NotFoundError: The folder that it is in does not.
        OSError: It cannot be written.
    """

    def __init__(self, output: Path, source: Path) -> None:
        if output.exists():
            raise _exists(output)
        if not output.absolute().parent.is_dir():
            raise NotFoundError(f"no folder {output.absolute().parent}, which --output should be in; make it")
        self._output = output
        self.path = output.with_name(f".{output.name}.{os.getpid()}")
        self._tensors: dict[str, Tensor] = {}
        self._index: dict[str, str] = {}
        self._num_bytes = 0
        self.path.mkdir()
        try:
            for file in source.iterdir():
                if file.is_file() and not file.name.endswith(_WEIGHTS):
                    shutil.copyfile(file, self.path / file.name)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Write tensors, or keep them until a file is full."""
        self._tensors |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._num_bytes >= _SHARD_BYTES:
            self._flush(f"model-{len(set(self._index.values())) + 1:05}.safetensors")

    def close(self, config: dict[str, Any]) -> None:
        """Write what is left, and ``config.json``."""
        if not self._index:
            self._flush("model.safetensors")
        else:
            if self._tensors:
                self._flush(f"model-{len(set(self._index.values())) + 1:05}.safetensors")
            index = {"metadata": {}, "weight_map": self._index}
            (self.path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (self.path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in self.path.glob("*.safetensors"):
            shutil.copymode(self.path / "config.json", file)  # safetensors' own is for the owner alone

    def finish(self) -> None:
        """Give the folder its name.

        Raises:
            AlreadyExistsError: Another program has made ``output`` meanwhile.
        """
        try:
            self.path.rename(self._output)
        except OSError as error:
            if self._output.exists():
                raise _exists(self._output) from error
            raise

    def _flush(self, filename: str) -> None:
        try:
            save_file(self._tensors, self.path / filename, {"format": "pt"})
        except SafetensorError as error:  # of a full disk, for one
            raise OSError(f"cannot write {filename} beside {self._output}: {error}") from error
        self._index |= dict.fromkeys(self._tensors, filename)
        self._tensors, self._num_bytes = {}, 0


def _exists(output: Path) -> AlreadyExistsError:
    return AlreadyExistsError(f"{output} exists; nothing was done. Remove it, or give another --output")
