"""What crosses the pipe of a model's process, as tuples of builtins: requests, outcomes, calls and errors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import ERROR_BY_CODE, InternalError, RemoteError, WeftError
from weft.base.tensors import WireTensor, datatype_of, encode
from weft.serving.backends.python.pipe import INLINE_BYTES, Outgoing, incoming_tensors
from weft.serving.request.request import RESCHEDULED, EncodedResponse, InferenceRequest, Outcome


def pack_error(error: WeftError) -> tuple[str, str, str | None, int | None]:
    """Code, text, and maybe an id or a pause in milliseconds."""
    return error.code, error.message, getattr(error, "error_id", None), getattr(error, "retry_after_ms", None)


def unpack_error(packed: Any) -> WeftError:
    """The error of ``pack_error``."""
    code, message, error_id, retry_after_ms = packed
    if error_id is not None:
        return InternalError("", error_id=error_id).with_message(message)
    if retry_after_ms is not None or code not in ERROR_BY_CODE:
        return RemoteError(code, message, retry_after_ms=retry_after_ms)
    return ERROR_BY_CODE[code](message)


def pack_request(number: int, request: InferenceRequest, outgoing: Outgoing) -> tuple[Any, ...]:
    """A request as the process gets it: of its headers, the ``traceparent`` alone."""
    call, context = request.call, request.context
    return (
        number,
        *pack_call(call, outgoing),
        context.deadline_ns,
        context.headers.get("traceparent"),
        request.num_rows,
        request.stream is not None,
    )


def pack_call(call: InferCall, outgoing: Outgoing) -> tuple[Any, ...]:
    """A call, as six fields."""
    return (
        call.model_name,
        call.model_version,
        call.request_id,
        call.parameters,
        outgoing.tensors(call.inputs),
        [output.name for output in call.outputs] if call.outputs else (),
    )


def unpack_call(packed: tuple[Any, ...], large: Any) -> InferCall:
    """The call of ``pack_call``."""
    model_name, version, request_id, parameters, inputs, outputs = packed
    names = tuple([RequestedOutput(name, {}) for name in outputs]) if outputs else ()
    return InferCall(model_name, version, request_id, parameters, incoming_tensors(inputs, large), names)


def pack_result(result: InferResult | None, outgoing: Outgoing) -> tuple[Any, ...] | None:
    """The answer to a nested call."""
    if result is None:
        return None
    names = result.model_name, result.model_version, result.request_id
    return (*names, plain(result.parameters), outgoing.tensors(result.outputs))


def unpack_result(packed: tuple[Any, ...] | None, large: Any) -> InferResult | None:
    """The answer of ``pack_result``."""
    if packed is None:
        return None
    name, version, request_id, parameters, outputs = packed
    return InferResult(name, version, request_id, parameters, incoming_tensors(outputs, large))


def pack_outcome(outcome: Outcome, outgoing: Outgoing) -> tuple[Any, ...] | None:
    """Outputs and parameters, or an error; None for RESCHEDULED."""
    if outcome is RESCHEDULED:
        return None
    if isinstance(outcome, WeftError):
        return pack_error(outcome)
    try:
        outputs = {name: _encoded(array) for name, array in outcome.outputs.items()}
    except WeftError as error:
        return pack_error(error)
    return outgoing.tensors(outputs), outcome.parameters


def unpack_outcome(packed: tuple[Any, ...] | None, large: Any) -> Outcome:
    """The outcome of ``pack_outcome``; outputs stay encoded."""
    if packed is None:
        return RESCHEDULED
    if len(packed) == 2:
        return EncodedResponse(incoming_tensors(packed[0], large), packed[1])
    return unpack_error(packed)


def _encoded(array: Any) -> WireTensor:
    """As ``encode``, but many numbers are not copied."""
    datatype = datatype_of(array)
    if datatype == "BYTES":
        return encode(array)
    if array.nbytes <= INLINE_BYTES:
        return WireTensor(datatype, array.shape, array.tobytes())
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return WireTensor(datatype, array.shape, data)  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """What a model has given, as builtins; NumPy's scalars and arrays too. Raises TypeError for other objects."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(plain, value)) if isinstance(value, tuple) else list(map(plain, value))
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    for base in (int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"{kind.__name__} is no plain value: give bool, int, float, str or bytes")
