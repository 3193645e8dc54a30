"""A ``model.py`` whose ``execute`` is a function of the test; requests for it, and its responses."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.core import CallContext, InferCall, RequestedOutput
from weft.base.tensors import decode, encode
from weft.serving.runtime.model import ServedModel

TIMEOUT_S = 20.0
FINAL = 1

SOURCE = """
import model_under_test
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return model_under_test.execute(requests, pb_utils)
"""
ASYNC_SOURCE = SOURCE.replace("def execute", "async def execute").replace("return model", "return await model")

Execute = Callable[[list[Any], Any], Any]


def response(pb_utils: Any, value: float, columns: int = 1) -> Any:
    """A response whose OUT is one row of ``value``."""
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, columns), value, np.float32))])


def value_of(result: Any) -> float:
    """The first element of OUT."""
    return float(decode(result.outputs["OUT"])[0, 0])


def call(value: float = 0, outputs: tuple[str, ...] = (), **parameters: Any) -> InferCall:
    """A call whose IN is one row of ``value``."""
    return InferCall(
        "m",
        request_id=f"r{value:g}",
        parameters=parameters,
        inputs={"IN": encode(np.full((1, 1), value, np.float32))},
        outputs=tuple(RequestedOutput(name, {}) for name in outputs),
    )


async def values(
    model: ServedModel, request: InferCall, context: CallContext | None = None, got: list[float] | None = None
) -> list[float]:
    """The values of the responses to a request, in ``got`` as they come; the null one is left out."""
    got = [] if got is None else got
    async for result in model.stream(request, context or CallContext()):
        if not result.is_null:
            got.append(value_of(result))
    return got


def is_running(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
