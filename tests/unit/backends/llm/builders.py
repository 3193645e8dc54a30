"""Requests for a language model."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from weft.backends.llm import tensors
from weft.base.core import CallContext, InferCall, ParameterValue, RequestedOutput
from weft.base.tensors import encode
from weft.serving.request.request import InferenceRequest

_DTYPES = {"TYPE_BOOL": np.bool_, "TYPE_INT32": np.int32, "TYPE_STRING": np.object_}


def make_request(
    *,
    outputs: Iterable[str] = (),
    parameters: Mapping[str, ParameterValue] | None = None,
    is_collected: bool = False,
    **inputs: Any,
) -> InferenceRequest:
    """A request whose inputs are given as Python values."""
    wire = {}
    for name, value in inputs.items():
        dtype = _DTYPES[tensors.INPUTS[name].data_type]
        elements = value if isinstance(value, list) else [value.encode() if isinstance(value, str) else value]
        wire[name] = encode(np.array(elements, dtype))
    wanted = tuple(RequestedOutput(name, {}) for name in outputs)
    call = InferCall("m", parameters=parameters or {}, inputs=wire, outputs=wanted)
    return InferenceRequest(call, CallContext(), is_collected=is_collected)
