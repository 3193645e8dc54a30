"""V2's ``infer``, ``generate`` and ``generate_stream`` over HTTP."""

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.base.caching import ExpiringCache
from weft.base.core import InferResult
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import num_elements
from weft.gateway.errors import RequestError, v2_body
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import (
    MIN_COMPRESSED_BYTES,
    Resources,
    accepted_encoding,
    compressed,
    decompressed,
    too_large,
)
from weft.gateway.http.responding import event_stream, run_until_disconnect
from weft.gateway.json_text import MAX_INLINE_VALUES, is_large
from weft.gateway.v2.request import (
    BINARY_SIZE,
    InferHead,
    generate_request,
    generate_response,
    json_of,
    parse_head,
    raw_request,
)
from weft.v2.client.v2_client import Metadata
from weft.v2.protocol.codec import InferMessage, given
from weft.v2.protocol.wire import message_of_call, result_of
from weft_protos import grpc_service_pb2 as pb

HEADER_LENGTH = "inference-header-content-length"
_MAX_INLINE_TEXT_BYTES = 1 << 20
#: How long the router has for a model's metadata, in seconds, and how long they are kept.
LOOKUP_TIMEOUT_S = 5.0
CACHE_TTL_S = 2.0
#: The JSON of larger outputs is made elsewhere.
MAX_INLINE_OUTPUT_BYTES = 64 << 10
_MAX_CACHED = 1024


async def make_body(
    result: InferResult,
    parameters: Mapping[str, Mapping[str, Any]],
    is_binary: Callable[[str], bool],
    run: Callable[..., Awaitable[bytes]],
) -> list[bytes]:
    """Build the body of a response: the JSON, and behind it the tensors in binary.

    Args:
        parameters: Parameters of outputs, by name; an output without data is in the shared memory that they name.
        is_binary: Whether the client wants an output in binary.
        run: Makes the JSON of an output, of a large one in another process: see ``Resources.run``.

    Raises InvalidArgumentError: a string of an output in JSON is not UTF-8.
    """
    outputs: list[bytes] = []
    tail: list[bytes] = []
    for name, tensor in result.outputs.items():
        own = dict(parameters.get(name, {}))
        fields: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.shape}
        data = b""
        if own:
            pass
        elif is_binary(name):
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
    return [text, *tail]


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _response(body: list[bytes], encoding: str) -> ASGIApp:
    """Response with the body of ``make_body``, compressed with ``gzip``, ``deflate`` or not ("")."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        pieces, headers = body, {"content-type": "application/json"}
        if len(pieces) > 1:
            headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(pieces[0]))}
        if encoding and sum(map(len, pieces)) >= MIN_COMPRESSED_BYTES:
            pieces = await compressed(pieces, encoding)
            headers["content-encoding"] = encoding
        headers["content-length"] = str(sum(map(len, pieces)))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return respond


class InferenceHandlers:
    """Handlers of inference."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._metadata = ExpiringCache[tuple[str, str, Metadata], pb.ModelMetadataResponse](
            CACHE_TTL_S, _MAX_CACHED, time.monotonic
        )

    async def infer(self, request: Request, context: RequestContext) -> ASGIApp:
        """One request, one response."""
        header = request.headers.get(HEADER_LENGTH)
        body = await self._body(request, context)

        async def respond() -> ASGIApp:
            message, is_binary = await self._request(request, context, header, body)
            response = await self._resources.router.infer_message(
                message, timeout_s=self._resources.limits.timeout_s, metadata=context.metadata()
            )
            parameters = {output.name: given(output.parameters) for output in response.tensors}
            run = partial(self._resources.run, context)
            made = await make_body(result_of(response), parameters, is_binary, run)
            return _response(made, accepted_encoding(request.headers.get("accept-encoding", "")))

        return await run_until_disconnect(request.receive, self._resources.stopping, respond())

    async def generate(self, request: Request, context: RequestContext) -> ASGIApp:
        """One object in, exactly one out."""
        body = await self._body(request, context)

        async def respond() -> ASGIApp:
            found: list[InferResult] = []
            async with contextlib.aclosing(self._results(request, context, body)) as results:
                async for result in results:
                    found.append(result)
                    if len(found) > 1:
                        break
            if len(found) != 1:
                raise InvalidArgumentError(
                    "generate expects model to produce exactly 1 response, and it gave "
                    f"{'several' if found else 'none'}; use generate_stream"
                )
            text = await self._resources.run(context, _is_large(found[0]), _generate_text, found[0])
            return Response(text, media_type="application/json")

        return await run_until_disconnect(request.receive, self._resources.stopping, respond())

    async def generate_stream(self, request: Request, context: RequestContext) -> ASGIApp:
        """One object in, each response an event. Errors before the first one have a status of their own."""
        body = await self._body(request, context)

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            async with contextlib.aclosing(self._results(request, context, body)) as results:
                async for result in results:
                    yield await self._resources.run(context, _is_large(result), generate_response, result)

        responding = event_stream(events(), context, self._resources.stopping, error_body=v2_body)
        return await run_until_disconnect(request.receive, self._resources.stopping, responding)

    async def _body(self, request: Request, context: RequestContext) -> list[bytes]:
        limits = self._resources.limits
        parts = await self._resources.body(request, context, limits.max_body_bytes)
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return parts
        in_work, client = self._resources.in_work, context.identity()

        def count(num_bytes: int) -> None:
            in_work.add(client, num_bytes)
            context.at_end.callback(in_work.remove, client, num_bytes)

        return await decompressed(parts, encoding, limits.max_body_bytes, count)

    async def _request(
        self, request: Request, context: RequestContext, header: str | None, body: list[bytes]
    ) -> tuple[InferMessage, Callable[[str], bool]]:
        """The request message, and whether an output is requested in binary."""
        name, version = request.path_params["name"], request.path_params.get("version", "")
        size = sum(map(len, body))
        json_size = size if header is None else _header_size(header, size)
        if not json_size and header is not None:
            model = await self._model(name, version, context.identity())
            return message_of_call(raw_request(model, version, body)), lambda _: True
        if json_size > self._resources.limits.max_json_bytes:
            raise too_large(f"{json_size} bytes of JSON", self._resources.limits.max_json_bytes)
        text, tail = _split(body, json_size)
        head: InferHead = await self._resources.run(context, is_large(text), parse_head, text, name, version)
        return head.request(tail), head.is_binary

    async def _results(
        self, request: Request, context: RequestContext, body: list[bytes]
    ) -> AsyncGenerator[InferResult, None]:
        """Responses to a request of the generate extension, without the empty final one."""
        text, limits = b"".join(body), self._resources.limits
        if len(text) > limits.max_json_bytes:
            raise too_large(f"{len(text)} bytes of JSON", limits.max_json_bytes)
        name, version = request.path_params["name"], request.path_params.get("version", "")
        model = await self._model(name, version, context.identity())
        call = await self._resources.run(
            context, is_large(text), generate_request, text, model.SerializeToString(), version
        )
        stream = self._resources.router.stream(call, timeout_s=limits.timeout_s, metadata=context.metadata())
        async with contextlib.aclosing(stream) as results:
            async for result in results:
                if not result.is_null:
                    yield result

    async def _model(self, name: str, version: str, identity: Metadata) -> pb.ModelMetadataResponse:
        wanted = pb.ModelMetadataRequest(name=name, version=version)
        call = self._resources.router.call
        return await self._metadata.get(
            (name, version, identity),
            lambda: call("ModelMetadata", wanted, timeout_s=LOOKUP_TIMEOUT_S, metadata=identity),
        )


def _header_size(header: str, size: int) -> int:
    if not (header.isascii() and header.isdecimal() and len(header) < 20 and int(header) <= size):
        raise RequestError(
            f"Inference-Header-Content-Length must be the size of the JSON, from 0 to the {size} bytes of the body, "
            f"got '{header[:40]}'"
        )
    return int(header)


def _split(parts: list[bytes], size: int) -> tuple[bytes, list[memoryview]]:
    """The first ``size`` bytes, and views of the rest."""
    rest = [memoryview(part) for part in parts]
    text: list[memoryview] = []
    while rest and size >= len(rest[0]):
        size -= len(rest[0])
        text.append(rest.pop(0))
    if size:
        text.append(rest[0][:size])
        rest[0] = rest[0][size:]
    return b"".join(text), rest


def _is_large(result: InferResult) -> bool:
    return sum(len(tensor.data) for tensor in result.outputs.values()) > MAX_INLINE_OUTPUT_BYTES


def _generate_text(result: InferResult) -> bytes:
    return json.dumps(generate_response(result), ensure_ascii=False).encode()
