"""What a fake target answers with."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import RemoteError
from weft_common.tensors import WireTensor, encode

Answer = Callable[[InferCall, CallContext], Awaitable[Mapping[str, WireTensor] | InferResult]]


def answering(*values: float, after_ms: float = 0, **parameters: Any) -> Answer:
    """A script: after a while the first input, or `values`, as every requested output, with response parameters."""

    async def answer(call: InferCall, context: CallContext) -> InferResult:
        if after_ms:
            await asyncio.sleep(after_ms / 1e3)
        value = encode(np.asarray(values, np.float32)) if values else next(iter(call.inputs.values()))
        outputs = {output.name: value for output in call.outputs}
        return InferResult(call.model_name, call.model_version or "1", call.request_id, parameters, outputs)

    return answer


def failing(code: str = "UNAVAILABLE", message: str = "gone", *, after_ms: float = 0) -> Answer:
    """A script: after a while an error."""

    async def fail(call: InferCall, context: CallContext) -> InferResult:
        if after_ms:
            await asyncio.sleep(after_ms / 1e3)
        raise RemoteError(code, message)

    return fail


def in_turn(*answers: Answer) -> Answer:
    """A script that answers the first call as the first of `answers` says, and so on; the last one repeats."""
    rest = list(answers)

    async def answer(call: InferCall, context: CallContext) -> Any:
        return await (rest.pop(0) if len(rest) > 1 else rest[0])(call, context)

    return answer
