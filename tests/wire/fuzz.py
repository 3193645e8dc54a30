"""Mutated byte streams into either end of the wire, in this process and without sockets.

``python -m tests.wire.fuzz --streams 1000000`` tells of its progress and ends with a report; each failure names the
number of its stream, and ``--only NUMBER`` does that one again.

A stream fails when an exception leaves the connection, when a task, a stream, a connection or a counted byte is left,
when it takes long, when an answer is no HTTP/2, when a call of the client has no end, or when the neighbour, a good
client of the same server, is not answered right.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import hpack
from tests.wire import peer as h2
from tests.wire.corpus import client_streams, cut, mutated, server_streams
from tests.wire.memory import MemoryTransport
from tests.wire.peer import PREFACE, Peer

from weft.wire.client import Channel
from weft.wire.client.dialling import DialError
from weft.wire.client.protocol import ClientProtocol
from weft.wire.server import Server, ServerOptions
from weft.wire.server.server import ServerProtocol
from weft.wire.transport import Http2Protocol

#: A stream may take so long, in seconds; it takes about a millisecond.
MAX_STREAM_S = 3.0
_NEIGHBOUR_EVERY = 50
_LEFT_EVERY = 500


_SHORT_LIVED = frozenset(
    {"ServerCall", "ClientCall", "ServerProtocol", "ClientProtocol", "Connection", "Channel", "Link", "MessageReader"}
)


class Failure(NamedTuple):
    """A stream that was not borne.

    Attributes:
        number: For ``--only``; what is found later than it happens is found with the last stream of its batch.
        what: What went wrong.
    """

    number: int
    what: str


def check_output(written: bytes, *, is_client: bool) -> None:
    """Assert that it is HTTP/2: whole frames of known types, fields that decode, nothing on a stream after its end."""
    assert not is_client or written.startswith(PREFACE)
    at = len(PREFACE) if is_client else 0
    decoder = hpack.Decoder(max_header_list_size=1 << 24)
    ended: set[int] = set()
    block: bytes | None = None
    while at < len(written):
        size, kind, flags = int.from_bytes(written[at : at + 3], "big"), written[at + 3], written[at + 4]
        stream_id = int.from_bytes(written[at + 5 : at + 9], "big")
        payload = written[at + 9 : at + 9 + size]
        assert len(payload) == size, "half a frame"
        assert kind <= h2.CONTINUATION, f"a frame of type {kind}"
        assert (block is None) == (kind != h2.CONTINUATION), "an interrupted header block"
        if kind in (h2.HEADERS, h2.CONTINUATION):
            block = (block or b"") + payload
            if flags & h2.END_HEADERS:
                assert decoder.decode(block) or not is_client
                block = None
        if kind in (h2.HEADERS, h2.DATA):
            assert stream_id not in ended, f"a frame of type {kind} on stream {stream_id}, which has ended"
            if flags & h2.END_STREAM:
                ended.add(stream_id)
        elif kind == h2.RST_STREAM:
            ended.add(stream_id)
        at += 9 + size


async def _echo(request: bytes, _context: Any) -> bytes:
    return request


async def _joined(requests: AsyncIterator[bytes], _context: Any) -> bytes:
    return b"".join([request async for request in requests])


async def _three(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    for _ in range(3):
        yield request


async def _each(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _wait(_request: bytes, _context: Any) -> bytes:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody ends this")


_METHODS = {
    "Unary": grpc.unary_unary_rpc_method_handler(_echo),
    "ClientStream": grpc.stream_unary_rpc_method_handler(_joined),
    "ServerStream": grpc.unary_stream_rpc_method_handler(_three),
    "BidiStream": grpc.stream_stream_rpc_method_handler(_each),
    "Slow": grpc.unary_unary_rpc_method_handler(_wait),
}


class Fuzzer:
    """Feeds streams to a server and to clients on the running event loop.

    Args:
        seed: With the number of a stream, it decides the stream.

    Attributes:
        failures: What was not borne.
        counts: How connections and calls ended.
        worst_s: The longest that one stream took.
    """

    def __init__(self, seed: int = 0) -> None:
        self.failures: list[Failure] = []
        self.counts: Counter[str] = Counter()
        self.worst_s = 0.0
        self._seed = seed
        self._loop = asyncio.get_running_loop()
        self._clients, self._servers = list(client_streams().values()), list(server_streams().values())
        self._server = Server(ServerOptions(max_message_bytes=1 << 20, max_buffered_bytes=64 << 20))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", _METHODS),))
        self._neighbour: Peer | None = None
        self._wrongs: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Errors that the event loop, the log or the interpreter tell of are failures."""
        wrongs = self._wrongs

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                wrongs.append(f"log: {record.getMessage()} {record.exc_info or ''}")

        handler, logger = Handler(logging.WARNING), logging.getLogger("weft.wire")
        logger.addHandler(handler)
        hook, sys.unraisablehook = sys.unraisablehook, lambda found: wrongs.append(f"unraisable: {found}")
        self._loop.set_exception_handler(lambda _, context: wrongs.append(f"event loop: {context}"))
        try:
            yield
        finally:
            self._loop.set_exception_handler(None)
            sys.unraisablehook = hook
            logger.removeHandler(handler)

    async def run(self, numbers: range, tell: Callable[[int], None] = lambda number: None) -> None:
        """Do these streams; an odd number is one to a client."""
        with self.watching():
            for number in numbers:
                await self.play(number)
                if number % _NEIGHBOUR_EVERY == 0:
                    await self._check(number, self._neighbour_is_answered)
                if number % _LEFT_EVERY == 0 or number == numbers[-1]:
                    await self._check(number, self._nothing_is_left)
                    tell(number)

    async def play(self, number: int) -> None:
        """One stream."""
        generator = random.Random(f"{self._seed}:{number}")
        begin_s = time.perf_counter()
        await self._check(number, lambda: self._to_client(generator) if number % 2 else self._to_server(generator))
        took_s = time.perf_counter() - begin_s
        self.worst_s = max(self.worst_s, took_s)
        if took_s > MAX_STREAM_S:
            self.failures.append(Failure(number, f"took {took_s:.1f} s"))

    async def _check(self, number: int, do: Callable[[], Any]) -> None:
        try:
            await do()
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
            self.failures.append(Failure(number, f"{type(error).__name__}: {error} at {where}"))
        self.failures += [Failure(number, wrong) for wrong in self._wrongs]
        self._wrongs.clear()

    async def _turns(self, number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)

    async def _to_server(self, generator: random.Random) -> None:
        stream = mutated(generator.choice(self._clients), self._clients, generator)
        protocol = ServerProtocol(self._server, self._server.options)
        transport = MemoryTransport(protocol)
        protocol.connection_made(transport)
        await self._feed(protocol, transport, cut(stream, generator), generator)
        failure = protocol.connection.failure
        self.counts[f"server: {failure.code.name if failure else 'no error'}"] += 1
        check_output(bytes(transport.written), is_client=False)

    async def _feed(
        self, protocol: Http2Protocol, transport: MemoryTransport, pieces: list[bytes], generator: random.Random
    ) -> None:
        """Give it the pieces, now and then in a turn of its own, and end the connection."""
        for index, piece in enumerate(pieces):
            if transport.is_closing():
                break
            soon = self._loop.call_soon  # as transports do: no task is running then
            soon(protocol.data_received, piece)
            await self._turns(generator.choice((1, 1, 3)))
            if generator.random() < 0.02:
                soon(protocol.pause_writing)
            elif generator.random() < 0.02:
                soon(protocol.resume_writing)
            if index == 0 and generator.random() < 0.02:
                soon(protocol.drain)
            if index == 1 and generator.random() < 0.05:
                soon(protocol.check, self._loop.time() + generator.choice((1.0, 100.0)))
        await self._turns(3)
        transport.close()
        await self._turns(4)

    async def _to_client(self, generator: random.Random) -> None:
        stream = mutated(generator.choice(self._servers), self._servers, generator)
        channel = Channel("127.0.0.1:1")
        made: list[tuple[ClientProtocol, MemoryTransport]] = []

        async def dial(make: Callable[[], ClientProtocol]) -> ClientProtocol:
            if made:
                raise DialError("there is but one connection")
            protocol = make()
            transport = MemoryTransport(protocol)
            made.append((protocol, transport))
            protocol.connection_made(transport)
            protocol.data_received(h2.settings_frame())
            return protocol

        channel.link._dialler.dial = dial  # type: ignore[method-assign]
        calls = [asyncio.ensure_future(call) for call in _calls(channel)]
        try:
            await self._turns(3)
            assert made, "it was not dialled"
            protocol, transport = made[0]
            pieces = cut(stream, generator)
            await self._feed(protocol, transport, pieces, generator)
            done, pending = await asyncio.wait(calls, timeout=MAX_STREAM_S)
            assert not pending, f"{len(pending)} calls have not ended"
            self.counts.update(f"client: {task.result()}" for task in done)
            check_output(bytes(transport.written), is_client=True)
        finally:
            for call in calls:
                call.cancel()
            await channel.close()
            await self._turns(2)

    async def _neighbour_is_answered(self) -> None:
        """One good call, over a connection of its own."""
        peer = Peer(h2.socket.socket())
        protocol = ServerProtocol(self._server, self._server.options)
        transport = MemoryTransport(protocol)
        protocol.connection_made(transport)
        sent = PREFACE + h2.settings_frame() + peer.request("/test.Echo/Unary", b"neighbour")
        self._loop.call_soon(protocol.data_received, sent)
        await self._turns(2)
        assert h2.message(b"neighbour") in transport.written, "the neighbour was not answered"
        peer.close()
        transport.close()
        await self._turns(2)

    async def _nothing_is_left(self) -> None:
        await self._turns(20)
        assert not self._server.protocols, f"{len(self._server.protocols)} connections are left"
        assert not self._server._num_buffered_bytes, f"{self._server._num_buffered_bytes} bytes are counted"
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(tasks) <= 1, f"tasks are left: {list(tasks)[:3]}"
        for _ in range(4):  # generators that are collected are closed by tasks, which leave garbage too
            gc.collect()
            await self._turns(3)
            left = Counter(type(kept).__name__ for kept in gc.get_objects() if _is_short_lived(kept))
            if not left:
                break
        assert not left, f"objects are left: {left}"


def _is_short_lived(kept: object) -> bool:
    return type(kept).__name__ in _SHORT_LIVED and str(type(kept).__module__).startswith("weft.wire")


def _calls(channel: Channel) -> list[Any]:
    """Three calls of different forms, each of which gives the name of its end."""

    async def unary() -> bytes:
        return await channel.unary_unary("/test.Echo/Unary")(b"question", timeout=60.0)

    async def server_stream() -> int:
        return len([message async for message in channel.unary_stream("/test.Echo/ServerStream")(b"3 20")])

    async def bidi() -> int:
        return len([message async for message in channel.stream_stream("/test.Echo/BidiStream")(iter([b"a", b"b"]))])

    async def named(call: Any) -> str:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    return [named(unary()), named(server_stream()), named(bidi())]


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def _main(options: argparse.Namespace) -> dict[str, Any]:
    fuzzer = Fuzzer(options.seed)
    begin_s = time.monotonic()
    samples: list[int] = []

    told = 0

    def tell(number: int) -> None:
        nonlocal told
        for failure in fuzzer.failures[told:]:
            print(f"failed: {failure}", flush=True)
        told = len(fuzzer.failures)
        faulthandler.dump_traceback_later(60, exit=True)
        samples.append(rss_bytes())
        if number % 20_000 == 0 and number:
            rate = (number - options.first) / (time.monotonic() - begin_s)
            failed = len(fuzzer.failures)
            print(f"{number:,} streams, {rate:.0f} a second, {failed} failed, {samples[-1] >> 20} MiB", flush=True)

    first = options.first if options.only is None else options.only
    last = options.first + options.streams if options.only is None else options.only + 1
    for start in range(first, last, 10_000):
        await fuzzer.run(range(start, min(start + 10_000, last)), tell)
        if len(fuzzer.failures) > 100:
            break
    faulthandler.cancel_dump_traceback_later()
    return {
        "streams": last - first,
        "seconds": round(time.monotonic() - begin_s, 1),
        "worst_ms": round(1e3 * fuzzer.worst_s, 1),
        "rss_mib": [sample >> 20 for sample in samples[:: max(len(samples) // 10, 1)]],
        "ends": dict(sorted(fuzzer.counts.items())),
        "failures": [failure._asdict() for failure in fuzzer.failures],
    }


def main() -> int:
    """Run it; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first stream")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this stream alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", default="", metavar="FILE")
    options = parser.parse_args()
    report = asyncio.run(_main(options))
    text = json.dumps(report, indent=1)
    print(text)
    if options.report:
        Path(options.report).parent.mkdir(parents=True, exist_ok=True)
        Path(options.report).write_text(text)
    return bool(report["failures"])


if __name__ == "__main__":
    sys.exit(main())
