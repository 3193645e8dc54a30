"""Bodies of inference responses: JSON, and binary tensors behind it."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from weft.base.core import InferResult
from weft.base.tensors import num_elements
from weft.gateway.http.content_encoding import MIN_COMPRESSED_BYTES, compressed
from weft.gateway.json_text import MAX_INLINE_VALUES
from weft.gateway.v2.request import BINARY_SIZE
from weft.gateway.v2.values import json_of

HEADER_LENGTH = "inference-header-content-length"
_MAX_INLINE_TEXT_BYTES = 1 << 20


class ResponseBody(NamedTuple):
    """A response body.

    Attributes:
        pieces: The JSON, and each binary tensor.
        header_bytes: Size of the JSON; None: there is nothing else.
    """

    pieces: list[bytes]
    header_bytes: int | None


async def make_body(
    result: InferResult,
    parameters: Mapping[str, Mapping[str, Any]],
    is_binary: Callable[[str], bool],
    run: Callable[..., Awaitable[bytes]],
) -> ResponseBody:
    """The body of a response.

    Args:
        result: The response.
        parameters: Parameters of outputs, by name; those of an output in shared memory, which has no data, name it.
        is_binary: Whether the client wants an output in binary.
        run: Makes the JSON of an output, a large one elsewhere: see ``Resources.run``.

    Raises:
        InvalidArgumentError: A string of an output in JSON is not UTF-8.
    """
    outputs: list[bytes] = []
    tail: list[bytes] = []
    has_binary = False
    for name, tensor in result.outputs.items():
        own = dict(parameters.get(name, {}))
        fields: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.shape}
        data = b""
        if own:
            pass
        elif is_binary(name):
            has_binary = True
            own[BINARY_SIZE] = len(tensor.data)
            tail.append(tensor.data)
        else:
            is_large = num_elements(tensor.shape) > MAX_INLINE_VALUES or len(tensor.data) > _MAX_INLINE_TEXT_BYTES
            data = b',"data":' + await run(is_large, json_of, tensor, name)
        if own:
            fields["parameters"] = own
        outputs.append(_json(fields)[:-1] + data + b"}")
    head: dict[str, Any] = {"model_name": result.model_name, "model_version": result.model_version}
    if result.request_id:
        head["id"] = result.request_id
    if result.parameters:
        head["parameters"] = dict(result.parameters)
    text = _json(head)[:-1] + b',"outputs":[' + b",".join(outputs) + b"]}"
    return ResponseBody([text, *tail], len(text) if has_binary else None)


class InferResponse:
    """Sends a body in its pieces, compressed if the client takes it.

    Args:
        body: The body.
        encoding: ``gzip``, ``deflate`` or "".
    """

    def __init__(self, body: ResponseBody, encoding: str) -> None:
        self._body = body
        self._encoding = encoding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client that has left is noticed by the server."""
        pieces, header_bytes = self._body
        headers = {"content-type": "application/json" if header_bytes is None else "application/octet-stream"}
        if header_bytes is not None:
            headers[HEADER_LENGTH] = str(header_bytes)
        if self._encoding and sum(map(len, pieces)) >= MIN_COMPRESSED_BYTES:
            pieces = await compressed(pieces, self._encoding)
            headers["content-encoding"] = self._encoding
        headers["content-length"] = str(sum(map(len, pieces)))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
