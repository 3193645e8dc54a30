"""What ``test.Echo`` has no RPC for: ``test.Talk``, a service on raw bytes for clients of all languages.

- ``Greet`` (bidirectional): ``hello`` before the first message has come, then each message.
- ``First`` (client stream): the first message, at once; the others are not read.
- ``End`` (bidirectional): initial metadata at once, the first message, then the status: as ``Status`` of ``test.Echo``.
- ``Fail`` (unary): UNKNOWN; the request is the details.
- ``Compressed`` (unary), ``CompressedStream`` (bidirectional): what came, compressed with gzip.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

Context = Any  # grpc.aio.ServicerContext, generic in its stubs alone


async def greet(requests: AsyncIterator[bytes], _context: Context) -> AsyncIterator[bytes]:
    yield b"hello"
    async for request in requests:
        yield request


async def first(requests: AsyncIterator[bytes], _context: Context) -> bytes:
    async for request in requests:
        return request
    return b""


async def end(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
    metadata = tuple(context.invocation_metadata() or ())
    asked = dict(metadata)
    await context.send_initial_metadata([pair for pair in metadata if pair[0].startswith("initial-")])
    trailing = tuple(pair for pair in metadata if pair[0].startswith("trailing-"))
    code = next(code for code in grpc.StatusCode if code.value[0] == int(asked.get("want-code", 0)))
    async for request in requests:
        yield request
        break
    if code is not grpc.StatusCode.OK:
        await context.abort(code, asked.get("want-details", ""), trailing)
    context.set_trailing_metadata(trailing)


async def fail(request: bytes, context: Context) -> bytes:
    await context.abort(grpc.StatusCode.UNKNOWN, request.decode())
    raise AssertionError("abort returned")


async def compressed(request: bytes, context: Context) -> bytes:
    context.set_compression(grpc.Compression.Gzip)
    return request


async def compressed_stream(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
    context.set_compression(grpc.Compression.Gzip)
    async for request in requests:
        yield request


def talk_handler() -> grpc.GenericRpcHandler:
    """All of them, by name."""
    table = {
        "Greet": grpc.stream_stream_rpc_method_handler(greet),
        "First": grpc.stream_unary_rpc_method_handler(first),
        "End": grpc.stream_stream_rpc_method_handler(end),
        "Fail": grpc.unary_unary_rpc_method_handler(fail),
        "Compressed": grpc.unary_unary_rpc_method_handler(compressed),
        "CompressedStream": grpc.stream_stream_rpc_method_handler(compressed_stream),
    }
    return grpc.method_handlers_generic_handler("test.Talk", table)
