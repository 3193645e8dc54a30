"""Calls and requests of the model that echoes."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from weft.base.core import CallContext, InferCall, RequestedOutput
from weft.base.tensors import encode
from weft.serving.request.request import InferenceRequest


def make_call(
    value: float = 0, rows: int = 1, columns: int = 2, outputs: Iterable[str] = (), **parameters: Any
) -> InferCall:
    """A call whose IN is filled with ``value``."""
    return InferCall(
        "echo",
        request_id=f"r{value}",
        parameters=parameters,
        inputs={"IN": encode(np.full((rows, columns), value, np.float32))},
        outputs=tuple(RequestedOutput(name, {}) for name in outputs),
    )


def make_request(
    rows: int = 1, priority: int = 0, timeout_us: int = 0, deadline_ns: int | None = None, key: object = None
) -> InferenceRequest:
    """A request for queue and batcher, without tensors."""
    context = CallContext(deadline_ns=deadline_ns)
    return InferenceRequest(InferCall("m"), context, rows, priority, timeout_us, batch_key=key)
