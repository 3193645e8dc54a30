"""Interceptors see every call before its handler does, however its bytes come."""

import asyncio

import grpc
import pytest
from tests.wire import peer
from tests.wire.peer import Peer, message

from weft.wire.server import Server

MESSAGE = message(b"hello")
WHOLE = [peer.data(1, MESSAGE, end=True)]
PARTS = [peer.data(1, MESSAGE[:3]), peer.data(1, MESSAGE[3:7]), peer.data(1, MESSAGE[7:], end=True)]
#: What a client sends: DATA, and whether it comes in the segment of the fields or in later ones.
WAYS = {
    "at once": (WHOLE, True),
    "in parts at once": (PARTS, True),
    "later": (WHOLE, False),
    "in parts later": (PARTS, False),
    "in parts, the end alone": ([peer.data(1, MESSAGE), peer.data(1, end=True)], False),
    "fields alone": ([], False),
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


@pytest.mark.parametrize(
    ("way", "admits"), [*((way, False) for way in WAYS), *((way, True) for way, (data, _) in WAYS.items() if data)]
)
async def test_interceptor_decides_before_the_handler(way, admits):
    """A refused call has the interceptor's status and reaches no handler; another is handled once, with its message."""
    data, is_at_once = WAYS[way]
    guard = Guard(admits)
    server = Server(interceptors=[guard])
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(guard.echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with await asyncio.to_thread(lambda: Peer.connect(f"127.0.0.1:{port}").handshake()) as client:
        head = client.request("/test/Echo", None, end=False)
        for number, segment in enumerate([b"".join([head, *data])] if is_at_once else [head, *data]):
            if number:
                await asyncio.sleep(0.02)  # a segment of its own
            client.send(segment)
        answer = await asyncio.to_thread(client.read_answer)
    await server.stop(None)
    if admits:
        assert (0, [b"hello"], ["intercepted", "handled"]) == (answer.status, answer.messages, guard.seen)
    else:
        assert (16, [], ["intercepted"]) == (answer.status, answer.messages, guard.seen)
