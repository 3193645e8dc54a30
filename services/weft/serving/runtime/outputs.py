"""Checks a backend's response against the model's signature and encodes it."""

from collections.abc import Mapping
from operator import attrgetter

import numpy as np

from weft.base.core import InferResult
from weft.base.errors import InternalError, InvalidArgumentError
from weft.base.reshape import reshaped
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, Array, WireTensor, datatype_of, encode
from weft.serving.request.request import InferenceRequest, InferenceResponse

_name = attrgetter("name")


class OutputEncoder:
    """Encodes the responses of one model version as results, with the shapes that clients see.

    Args:
        signature: As clients see it.
        is_checked: Whether outputs must be as the signature says; see ``Backend.checks_outputs``.
    """

    def __init__(self, signature: ModelSignature, *, is_checked: bool = True) -> None:
        self._is_checked = is_checked
        self._model = signature.name
        self._version = signature.version
        self._specs = {spec.name: spec for spec in signature.outputs}
        self._has_batch = signature.max_batch_size > 0

    def encode(self, request: InferenceRequest, response: InferenceResponse) -> InferResult:
        """The result of a request: of the outputs it asked for, or of all, those that the model gave.

        Raises:
            InternalError: An output is unknown, missing and not optional, or differs from the signature in datatype or
                shape, where that is checked.
        """
        call = request.call
        outputs = response.outputs
        specs = self._specs
        encoded: dict[str, WireTensor] = {}
        if not outputs.keys() <= specs.keys():
            outputs = self._known(outputs)
        for name in map(_name, call.outputs) if call.outputs else outputs:
            array = outputs.get(name)
            if array is not None:
                encoded[name] = self._encode(specs[name], array, request.num_rows)
            elif self._is_checked and not specs[name].is_optional:
                raise InternalError(f"model '{self._model}' did not give output '{name}', which the request asked for")
        return InferResult(self._model, self._version, call.request_id, response.parameters, encoded)

    def _known(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs that the signature has. Raises InternalError for another one, where that is checked."""
        unknown = sorted(outputs.keys() - self._specs.keys())
        if self._is_checked:
            raise InternalError(
                f"model '{self._model}' gave unknown output '{unknown[0]}'; its configuration has "
                f"{', '.join(self._specs)}"
            )
        return {name: array for name, array in outputs.items() if name in self._specs}

    def _encode(self, spec: TensorSpec, array: Array, num_rows: int) -> WireTensor:
        if not isinstance(array, np.ndarray):
            raise InternalError(
                f"model '{self._model}' gave output '{spec.name}' as {type(array).__name__}; it must be a numpy array"
            )
        has_datatype = array.dtype == NUMPY_BY_DATATYPE[spec.datatype]
        if not has_datatype and self._is_checked:
            self._check_datatype(spec, array)
        shape = array.shape
        dims = spec.dims if spec.reshape is None else spec.reshape
        expected = (num_rows, *dims) if self._has_batch else dims
        if shape != expected and (
            len(shape) != len(expected) or any(want not in (-1, got) for got, want in zip(shape, expected, strict=True))
        ):
            if not self._is_checked:
                return encode(array)
            raise InternalError(
                f"model '{self._model}' gave output '{spec.name}' with shape {list(shape)} for {num_rows} rows; its "
                f"configuration says {list(expected)}"
            )
        if spec.datatype == "BYTES" or not has_datatype:
            tensor = encode(array)
        else:
            tensor = WireTensor(spec.datatype, shape, array.tobytes())
        return tensor if spec.reshape is None else tensor._replace(shape=reshaped(shape, dims, spec.dims))

    def _check_datatype(self, spec: TensorSpec, array: Array) -> None:
        try:
            datatype = datatype_of(array)
        except InvalidArgumentError:
            datatype = str(array.dtype)
        if datatype != spec.datatype:
            raise InternalError(
                f"model '{self._model}' gave output '{spec.name}' with datatype {datatype}; its configuration says "
                f"{spec.datatype}"
            )
