"""Models, requests and batches for backends that are tested without a server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weft.base.core import CallContext, InferCall, RequestedOutput
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import Array, encode
from weft.serving.backends.base import Backend, Batch, InstanceContext, ModelContext
from weft.serving.request.request import InferenceRequest

Declared = Mapping[str, tuple[str, tuple[int, ...]]]


class MakeModelContext(Protocol):
    """The type of fixture ``make_model_context``."""

    def __call__(
        self,
        inputs: Declared,
        outputs: Declared,
        *,
        max_batch_size: int = 8,
        directory: Path = ...,
        optional: tuple[str, ...] = (),
        config: Mapping[str, Any] | None = None,
        is_decoupled: bool = False,
        **parameters: str,
    ) -> ModelContext:
        """The context of a model from inputs and outputs as ``{name: (datatype, dims)}``."""


def model_context(
    inputs: Declared,
    outputs: Declared,
    *,
    directory: Path,
    max_batch_size: int = 8,
    optional: tuple[str, ...] = (),
    config: Mapping[str, Any] | None = None,
    is_decoupled: bool = False,
    **parameters: str,
) -> ModelContext:
    """The context of a model from inputs and outputs as ``{name: (datatype, dims)}``."""
    signature = ModelSignature(
        name="model",
        version="1",
        platform="",
        max_batch_size=max_batch_size,
        inputs=tuple(TensorSpec(n, datatype, dims, n in optional) for n, (datatype, dims) in inputs.items()),
        outputs=tuple(TensorSpec(n, datatype, dims) for n, (datatype, dims) in outputs.items()),
        is_decoupled=is_decoupled,
    )
    declared = {"name": "model", "max_batch_size": max_batch_size}
    declared |= {"input": _entries(inputs), "output": _entries(outputs)}
    return ModelContext(signature, directory, declared | dict(config or {}), parameters)


def _entries(tensors: Declared) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "data_type": f"TYPE_{'STRING' if datatype == 'BYTES' else datatype}",
            "dims": list(map(str, dims)),
        }
        for name, (datatype, dims) in tensors.items()
    ]


def load_backend(backend: type[Backend], model: ModelContext) -> Any:
    """A loaded backend on the CPU."""
    loaded = backend(model, InstanceContext("model_0_0"))
    loaded.load()
    return loaded


def make_served_request(
    *, wants: tuple[str, ...] = (), request_id: str = "", **inputs: Array | list[Any]
) -> InferenceRequest:
    """A validated request from arrays by input name; lists become BYTES of shape ``[n, 1]``."""
    arrays = {
        name: np.array([[element] for element in value] or np.empty((0, 1)), np.object_)
        if isinstance(value, list)
        else value
        for name, value in inputs.items()
    }
    call = InferCall(
        "model",
        request_id=request_id,
        inputs={name: encode(array) for name, array in arrays.items()},
        outputs=tuple(RequestedOutput(name, {}) for name in wants),
    )
    num_rows = next((len(array) for array in arrays.values() if array.ndim), 1)
    return InferenceRequest(call, CallContext(), num_rows=num_rows)


def execute_batch(backend: Backend, *requests: InferenceRequest) -> list[Any]:
    """The outcomes of the requests, run as one batch."""
    return backend.execute(Batch(list(requests)))
