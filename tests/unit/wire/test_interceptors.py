"""Interceptors see every call before its handler does, however its bytes come."""

import asyncio
import struct

import grpc
import hpack
import pytest

from weft.wire.server import Server

FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Echo"),
    (":authority", "a"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
MESSAGE = b"\0\0\0\0\x05hello"
DATA, HEADERS, END_STREAM, END_HEADERS = 0, 1, 1, 4


def frame(kind, flags, payload, stream_id=1):
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream_id) + payload


HEAD = frame(HEADERS, END_HEADERS, hpack.Encoder().encode(FIELDS))
WHOLE = frame(DATA, END_STREAM, MESSAGE)
PARTS = [frame(DATA, 0, MESSAGE[:3]), frame(DATA, 0, MESSAGE[3:7]), frame(DATA, END_STREAM, MESSAGE[7:])]

#: What a client sends, in one or several segments.
WAYS = {
    "at once": [HEAD + WHOLE],
    "in parts at once": [HEAD + b"".join(PARTS)],
    "later": [HEAD, WHOLE],
    "in parts later": [HEAD, *PARTS],
    "in parts, the end alone": [HEAD, frame(DATA, 0, MESSAGE), frame(DATA, END_STREAM, b"")],
}


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls, or lets them pass, and keeps in order what happened."""

    def __init__(self, admits: bool) -> None:
        self._admits = admits
        self.seen: list[str] = []

    async def intercept_service(self, continuation, details):
        self.seen.append("intercepted")
        handler = await continuation(details)
        return handler if self._admits else grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests, context):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")

    async def echo(self, request, context):
        """The method that is guarded."""
        self.seen.append("handled")
        return request


@pytest.fixture
async def ended():
    """Sends segments to a server with a guard; gives the fields of the answer, its body and what was seen."""
    servers: list[Server] = []

    async def send(segments, *, admits):
        guard = Guard(admits)
        server = Server(interceptors=[guard])
        servers.append(server)
        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(guard.echo)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b"", 0))
        decoder, fields, body = hpack.Decoder(), {}, b""
        for number, segment in enumerate(segments):
            if number:
                await asyncio.sleep(0.02)  # a segment of its own
            writer.write(segment)
        async with asyncio.timeout(10):
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == HEADERS:
                    fields |= dict(decoder.decode(payload))
                elif head[3] == DATA:
                    body += payload
                if head[3] in (DATA, HEADERS) and head[4] & END_STREAM:
                    break
        writer.close()
        return fields, body, guard.seen

    yield send
    for server in servers:
        await server.stop(None)


@pytest.mark.parametrize("way", WAYS)
async def test_refused_call_reaches_no_handler(ended, way):
    """Its status is that of the interceptor, and the handler has not run."""
    fields, body, seen = await ended(WAYS[way], admits=False)
    assert ("16", b"", ["intercepted"]) == (fields["grpc-status"], body, seen)


@pytest.mark.parametrize("way", WAYS)
async def test_admitted_call_is_handled_once(ended, way):
    """After the interceptor, with its whole message."""
    fields, body, seen = await ended(WAYS[way], admits=True)
    assert ("0", MESSAGE, ["intercepted", "handled"]) == (fields["grpc-status"], body, seen)


async def test_call_is_refused_before_its_message_comes(ended):
    """A client that sends fields alone gets the status."""
    fields, _, seen = await ended([HEAD], admits=False)
    assert ("16", ["intercepted"]) == (fields["grpc-status"], seen)
