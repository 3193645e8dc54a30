"""Base class of transforms: every array has a batch dimension, and errors name the row."""

import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array
from weft.serving.backends.base import Batch, TensorBackend
from weft.serving.request.request import InferenceRequest, InferenceResponse, Outcome


class RowBackend(TensorBackend):
    """A ``TensorBackend`` on the CPU whose arrays always have a batch dimension.

    ``run`` takes and returns arrays ``[num_rows, ...]`` of all requests of the batch; those of a model with
    ``max_batch_size`` 0 have one row. It checks the data of all rows at once: after an InvalidArgumentError every
    request runs alone, and only those with invalid data fail.
    """

    can_use_gpu: ClassVar[bool] = False

    def rows(self, request: InferenceRequest, name: str) -> Array:
        """Input ``name`` as ``[num_rows, ...]``. Raises InvalidArgumentError for an optional one that is missing."""
        if name not in request.call.inputs:
            raise InvalidArgumentError(f"input '{name}' is missing; this model needs it in every request")
        array = request.array(name)
        return array if self.model.signature.max_batch_size else array[None]

    def prepare(self, request: InferenceRequest) -> dict[str, Array]:
        """Every input with its batch dimension."""
        return {spec.name: self.rows(request, spec.name) for spec in self.model.signature.inputs}

    def execute(self, batch: Batch) -> list[Outcome]:
        """Prepare, gather, run, scatter."""
        outcomes = self._outcomes(batch)
        if not self.model.signature.max_batch_size:
            for outcome in outcomes:
                if isinstance(outcome, InferenceResponse):
                    outcome.outputs = {name: array[0] for name, array in outcome.outputs.items()}
        return outcomes

    def _outcomes(self, batch: Batch) -> list[Outcome]:
        try:
            return super().execute(batch)
        except InvalidArgumentError as error:
            if len(batch.requests) == 1:
                return [error]
        alone = [self._outcomes(Batch([request]))[0] for request in batch.requests]
        batch.infer_end_ns = time.monotonic_ns()
        return alone


def check_rows(is_good: Array, name: str, fault: Callable[[int], str]) -> None:
    """Raise InvalidArgumentError unless every element of ``is_good``, bool ``[num_rows, ...]``, is true.

    The message names the input and the first bad row; ``fault`` describes it and what is allowed.
    """
    if not is_good.all():
        row = int(is_good.reshape(len(is_good), -1).all(axis=1).argmin())
        raise InvalidArgumentError(f"input '{name}' row {row}: {fault(row)}")


def check_finite(array: Array, name: str) -> None:
    """Raise InvalidArgumentError with the first row of ``array``, ``[num_rows, ...]``, that has NaN or infinity."""
    is_finite = np.isfinite(array)
    if not is_finite.all():
        check_rows(is_finite, name, lambda row: f"{first_bad(array[row], is_finite[row])}; numbers must be finite")


def first_bad(values: Array, is_good: Array) -> str:
    """The first bad value of one row, with its index: ``"nan at [2]"``."""
    index = np.unravel_index(int(np.argmin(is_good)), is_good.shape)
    return f"{values[index]} at [{', '.join(map(str, index))}]" if index else f"{values}"
