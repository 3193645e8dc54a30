"""``weft.fake``: stands for a model when a graph is run in Python."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from typing import Any

import numpy as np

from weft.base.core import CallContext, IndexEntry, InferCall, InferResult
from weft.base.errors import InternalError, InvalidArgumentError, RemoteError, WeftError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.statistics import ModelStatistics
from weft.base.tensors import NUMPY_BY_DATATYPE, Array, WireTensor, array_of, decode, encode
from weft.base.text.suggestion import suggestion
from weft.base.validation import validate
from weft.router.repository.config import config_of_signature
from weft.wire.interface import grpc
from weft_protos.model_config_pb2 import ModelConfig


class Fake:
    """Stands for a model; made by ``weft.fake``.

    Attributes:
        calls: The inputs of each call so far, by name; BYTES inputs are object arrays of ``bytes``.
    """

    def __init__(self, answer: Any, delay_ms: float) -> None:
        self.answer, self.delay_ms = answer, delay_ms
        self.calls: list[dict[str, Array]] = []


def fake(
    answer: Mapping[str, Any] | Callable[..., Any] | BaseException | str | None = None,
    /,
    *,
    delay_ms: float = 0,
    **outputs: Any,
) -> Fake:
    """A stand-in for a model: ``weft.fake(PROBS=[0.1, 0.9])``; its answers are checked against the model's signature.

    Args:
        answer: A function of the inputs, which are numpy arrays under their names; it returns the outputs by name, and
            may be async; a generator gives the responses of a decoupled model. An exception, or the name of a gRPC
            status such as "UNAVAILABLE": every call fails with it. Or the outputs by name.
        delay_ms: How long each answer takes, in milliseconds.
        outputs: Constants, repeated for each row of the batch; None leaves out an optional output.

    What the function raises is the model's answer if it is a WeftError; any other exception ends the run of the graph.

    Raises InvalidArgumentError: ``answer`` is none of these.
    """
    if isinstance(answer, str):
        if answer not in grpc.StatusCode.__members__ or answer == "OK":
            hint = suggestion(answer, grpc.StatusCode.__members__)
            raise InvalidArgumentError(f"weft.fake('{answer}'): there is no such error status{hint}")
        answer = RemoteError(answer, f"the fake answers {answer}")
    if isinstance(answer, type) and issubclass(answer, Exception):
        answer = answer("the fake raises it")
    if answer is None or isinstance(answer, Mapping):
        answer = {**(answer or {}), **outputs}
    elif outputs or not (callable(answer) or isinstance(answer, BaseException)):
        raise InvalidArgumentError(
            f"weft.fake({answer!r}, ...): give constants, or one function, exception or name of a gRPC status"
        )
    return Fake(answer, delay_ms)


class FakeCore:
    """Answers like a model server; has those parts of ``InferenceCore`` that ``InProcessTarget`` calls.

    Attributes:
        faults: What is wrong with the fakes themselves, to be raised to whoever runs the graph.
    """

    def __init__(self, fakes: Mapping[str, tuple[Fake, ModelSignature]]) -> None:
        self.faults: list[Exception] = []
        self._fakes = fakes
        self._configs = {name: config_of_signature(signature) for name, (_, signature) in fakes.items()}
        for one, signature in fakes.values():
            if isinstance(one.answer, Mapping):
                outputs_of(one.answer, signature, num_rows=1)

    def config(self, name: str, version: str) -> ModelConfig:
        """The configuration of a model."""
        return self._configs[name]

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Every model, ready."""
        return [IndexEntry(name, signature.version, "READY", "") for name, (_, signature) in self._fakes.items()]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """None; a fake counts its calls."""
        return []

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Answer a request for one response."""
        async with contextlib.aclosing(self.stream_infer(call, context)) as results:
            found = [result async for result in results if not result.is_null]
        if len(found) == 1:
            found[0].is_final = True
            return found[0]
        error = _fault(
            self._fakes[call.model_name][1], f"gives {len(found)} responses where one is asked for; give one"
        )
        self.faults.append(error)
        raise _failure(error)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """Yield every response, and the end."""
        one, signature = self._fakes[call.model_name]
        num_rows = validate(call, signature)
        inputs = {name: decode(tensor, name=name) for name, tensor in call.inputs.items()}
        one.calls.append(inputs)
        await asyncio.sleep(one.delay_ms / 1000)
        result = InferResult(call.model_name, signature.version, call.request_id, is_final=False)
        try:
            async with contextlib.aclosing(responses_of(one.answer, inputs)) as responses:
                async for response in responses:
                    outputs = outputs_of(response, signature, num_rows)
                    asked = [output.name for output in call.outputs] or list(outputs)
                    yield replace(result, outputs={name: outputs[name] for name in asked if name in outputs})
        except WeftError:
            raise
        except Exception as error:
            if error is not one.answer:
                self.faults.append(error)
            raise _failure(error) from error
        yield replace(result, is_final=True, is_null=True)


async def responses_of(answer: Any, inputs: Mapping[str, Array]) -> AsyncGenerator[Any, None]:
    """What a fake gives; its function runs on a thread, an async one on the event loop."""
    if isinstance(answer, BaseException):
        raise answer
    value = await asyncio.to_thread(partial(answer, **inputs)) if callable(answer) else answer
    if isawaitable(value):
        value = await value
    if isinstance(value, AsyncIterator):
        async for response in value:
            yield response
    elif isinstance(value, Iterator):
        while (response := await asyncio.to_thread(next, value, None)) is not None:
            yield response
    else:
        yield value


def _failure(error: Exception) -> InternalError:
    return InternalError(f"a fake raised {type(error).__name__}: {error}")


def _fault(signature: ModelSignature, text: str) -> ValueError:
    return ValueError(f"the fake of model '{signature.name}' {text}")


def outputs_of(given: Any, signature: ModelSignature, num_rows: int) -> dict[str, WireTensor]:
    """The outputs of a fake as tensors in the model's order. Raises ValueError: they are not what the model gives."""
    if not isinstance(given, Mapping):
        raise _fault(signature, f"gives {type(given).__name__}; give a dict with an array for each output")
    specs = {spec.name: spec for spec in signature.outputs}
    for name in given.keys() - specs.keys():
        raise _fault(signature, f"gives '{name}', which is no output of the model; its outputs are {', '.join(specs)}")
    found = {}
    for name, spec in specs.items():
        if given.get(name) is not None:
            found[name] = _tensor(given[name], spec, signature, num_rows)
        elif not spec.is_optional:
            raise _fault(signature, f"does not give output '{name}' ({spec.datatype} {list(spec.dims)}); add it")
    return found


def _tensor(value: Any, spec: TensorSpec, signature: ModelSignature, num_rows: int) -> WireTensor:
    """A tensor of the output's type and shape; what lacks the batch dimension is repeated for each row."""
    text, dtype, has_batch = (
        f"gives output '{spec.name}' as",
        NUMPY_BY_DATATYPE[spec.datatype],
        signature.max_batch_size,
    )
    if not isinstance(value, np.ndarray):
        try:
            value = array_of(value, spec.datatype, what=f"value of output '{spec.name}'")
        except InvalidArgumentError as error:
            raise _fault(signature, f"does not fit: {error.message}") from None
    is_text = value.dtype.kind in "OSU"
    if is_text != (spec.datatype == "BYTES") or not (is_text or np.can_cast(value.dtype, dtype, "same_kind")):
        raise _fault(signature, f"{text} {value.dtype}, and the model gives {spec.datatype}; convert it")
    want = (num_rows, *spec.dims) if has_batch else spec.dims
    if value.shape == want[:1] and all(dim == 1 for dim in want[1:]):
        value = value.reshape(want)
    own = (1,) * (len(want) - value.ndim) + value.shape
    try:
        shape = [size if dim == -1 else dim for dim, size in zip(want, own, strict=True)]
        return encode(np.broadcast_to(value, shape).astype(dtype))
    except ValueError:
        allowed = f"{list(spec.dims)}, which is repeated for each row, or {list(want)}" if has_batch else list(want)
        raise _fault(signature, f"{text} shape {list(value.shape)}; give {allowed}") from None
