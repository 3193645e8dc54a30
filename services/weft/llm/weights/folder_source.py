"""Weights of the safetensors files of a Hugging Face folder, quantised or not."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from weft.base.errors import InvalidArgumentError
from weft.llm.weights.checkpoint import Checkpoint, StoredTensor
from weft.llm.weights.formats.detection import weight_format
from weft.llm.weights.formats.weight_format import ReadWeight, WeightFormat
from weft.llm.weights.parts import Part

_WEIGHT = ".weight"


class FolderSource:
    """Reads weights one at a time. Created by ``open``.

    Args:
        checkpoint: Open files.
        weight_format: Of the quantised weights; None: all are plain numbers.
    """

    def __init__(self, checkpoint: Checkpoint, weight_format: WeightFormat | None) -> None:
        self._checkpoint = checkpoint
        self._format = weight_format

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Open the files of the folder; leaving the ``with`` block closes them.

        Raises:
            NotFoundError, InvalidArgumentError: As of ``Checkpoint.open`` and ``weight_format``.
        """
        found = weight_format(path)
        with Checkpoint.open(path) as checkpoint:
            yield cls(checkpoint, found)

    @property
    def format_name(self) -> str:
        """Name of the format of quantised weights, for the log."""
        return self._format.name if self._format is not None else "none"

    def check(self, parts: Iterable[Part], ignored: Iterable[str]) -> None:
        """Validate names, shapes and types of all tensors against the model, before the weights are read.

        Args:
            parts: All weights of the model.
            ignored: Tensors that may be present as well.

        Raises:
            InvalidArgumentError: Tensors are missing, unexpected, or of another shape or type.
        """
        wanted: dict[str, StoredTensor] = {}
        surplus = list(ignored)
        for part in parts:
            weight_format = self._format_of(part)
            if weight_format is None:
                wanted[part.name] = StoredTensor(part.shape)
            else:
                wanted |= weight_format.tensors(_module(part), _sides(part), self._checkpoint)
                surplus += weight_format.ignored(_module(part))
        self._checkpoint.check(wanted, surplus)
        for name in surplus:
            if name.endswith(".bias") and name not in wanted and self._checkpoint.find(name) is not None:
                self._check_zero(name)

    def is_quantized(self, part: Part) -> bool:
        """Whether the weight is stored in the format of quantised weights."""
        return self._format_of(part) is not None

    def read(self, part: Part) -> ReadWeight:
        """The weight, on the CPU; numbers in the type that they are stored in.

        Raises:
            InvalidArgumentError: A file cannot be read, or its values are impossible.
        """
        weight_format = self._format_of(part)
        if weight_format is None:
            return self._checkpoint.read(part.name)
        return weight_format.read(_module(part), _sides(part), self._checkpoint)

    def _format_of(self, part: Part) -> WeightFormat | None:
        if self._format is None or not part.name.endswith(_WEIGHT) or len(part.shape) != len(("out", "in")):
            return None
        return self._format if self._format.is_quantized(_module(part), self._checkpoint) else None

    def _check_zero(self, name: str) -> None:
        if self._checkpoint.read(name).count_nonzero():
            raise InvalidArgumentError(
                f"weights: '{name}' must be zeros or absent, since the model has no such bias, got other numbers; "
                f"config.json and the weights are of different models"
            )


def _module(part: Part) -> str:
    return part.name.removesuffix(_WEIGHT)


def _sides(part: Part) -> tuple[int, int]:
    outputs, inputs = part.shape
    return outputs, inputs
