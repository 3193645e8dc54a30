"""Checks a backend's response against the model's signature and encodes it."""

from operator import attrgetter

import numpy as np

from weft_common.core import InferResult
from weft_common.errors import InternalError, InvalidArgumentError
from weft_common.signature import ModelSignature, TensorSpec
from weft_common.tensors import NUMPY_BY_DATATYPE, Array, WireTensor, datatype_of, encode
from weft_serving.request.request import InferenceRequest, InferenceResponse
from weft_serving.request.reshape import reshaped

_name = attrgetter("name")


class OutputEncoder:
    """Encodes the responses of one model version as results, with the shapes that clients see.

    Args:
        signature: As clients see it.
    """

    def __init__(self, signature: ModelSignature) -> None:
        self._model = signature.name
        self._version = signature.version
        self._specs = {spec.name: spec for spec in signature.outputs}
        self._has_batch = signature.max_batch_size > 0

    def encode(self, request: InferenceRequest, response: InferenceResponse) -> InferResult:
        """The result of a request: the outputs it asked for, or all outputs of the model.

        Raises:
            InternalError: An output is unknown, missing, or differs from the signature in datatype or shape.
        """
        call = request.call
        outputs = response.outputs
        for name in outputs:
            if name not in self._specs:
                raise InternalError(
                    f"model '{self._model}' gave unknown output '{name}'; its configuration has "
                    f"{', '.join(self._specs)}"
                )
        encoded: dict[str, WireTensor] = {}
        for name in map(_name, call.outputs) if call.outputs else outputs:
            array = outputs.get(name)
            if array is None:
                raise InternalError(f"model '{self._model}' did not give output '{name}', which the request asked for")
            encoded[name] = self._encode(self._specs[name], array, request.num_rows)
        return InferResult(self._model, self._version, call.request_id, response.parameters, encoded)

    def _encode(self, spec: TensorSpec, array: Array, num_rows: int) -> WireTensor:
        if not isinstance(array, np.ndarray):
            raise InternalError(
                f"model '{self._model}' gave output '{spec.name}' as {type(array).__name__}; it must be a numpy array"
            )
        if array.dtype != NUMPY_BY_DATATYPE[spec.datatype]:
            self._check_datatype(spec, array)
        shape = array.shape
        dims = spec.dims if spec.reshape is None else spec.reshape
        expected = (num_rows, *dims) if self._has_batch else dims
        if shape != expected and (
            len(shape) != len(expected) or any(want not in (-1, got) for got, want in zip(shape, expected, strict=True))
        ):
            raise InternalError(
                f"model '{self._model}' gave output '{spec.name}' with shape {list(shape)} for {num_rows} rows; its "
                f"configuration says {list(expected)}"
            )
        if spec.datatype == "BYTES" or array.dtype != NUMPY_BY_DATATYPE[spec.datatype]:
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
