"""A gRPC service on raw bytes, on either wire: ``python -m tests.wire.echo_service --wire weft``.

It prints ``{"grpc": "host:port", "unix": "unix:/path", "tls": "host:port", "pid": 1}`` as one line when it listens, and
stops with SIGTERM, SIGINT, or the end of its standard input. Its RPCs, all of ``test.Echo``:

- ``Unary``: the request.
- ``Slow``: the request, once a ``Release`` was called; waits until then, or until it is cancelled.
- ``Release``: how many ``Slow`` calls it releases.
- ``Status``: ends with code ``want-code`` and details ``want-details`` of the metadata, or ``want-details-bin``, UTF-8;
  what is named ``trailing-*`` comes back as trailing metadata, what is named ``initial-*`` as initial metadata.
- ``Meta``: the metadata of the call as JSON, a list of ``[name, value]``; values of ``-bin`` in hexadecimal.
- ``Big``: as many bytes as the request says in decimal digits.
- ``Size``: how many bytes the request has, in decimal digits.
- ``ServerStream``: the request is ``NUM SIZE``: so many messages of so many bytes.
- ``ClientStream``: ``NUM SIZE``: how many messages came, and their bytes together.
- ``BidiStream``: each message, as it comes.
- ``Stats``: what the process holds, as JSON; see ``Stats``. With the request ``collect`` after a garbage collection.

It serves ``test.Talk`` (``talk.py``) too.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import resource
import signal
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from tests.wire.talk import talk_handler

Context = Any  # grpc.aio.ServicerContext, generic in its stubs alone


class Echo:
    """The RPCs, and what they count."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.released = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.num_slow = 0

    async def unary(self, request: bytes, _context: Context) -> bytes:
        self.counts["unary"] += 1
        return request

    async def slow(self, request: bytes, _context: Context) -> bytes:
        self.counts["slow"] += 1
        self.num_slow += 1
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.counts["slow_cancelled"] += 1
            raise
        finally:
            self.num_slow -= 1
        return request

    async def release(self, _request: bytes, _context: Context) -> bytes:
        number = self.num_slow
        self.released.set()
        self.released = asyncio.Event()
        return b"%d" % number

    async def status(self, request: bytes, context: Context) -> bytes:
        metadata = [(name, value) for name, value in context.invocation_metadata() or ()]
        first = dict(metadata)
        initial = [pair for pair in metadata if pair[0].startswith("initial-")]
        if initial:
            await context.send_initial_metadata(initial)
        code = next(code for code in grpc.StatusCode if code.value[0] == int(first.get("want-code", 0)))
        trailing = tuple(pair for pair in metadata if pair[0].startswith("trailing-"))
        if code is grpc.StatusCode.OK:
            context.set_trailing_metadata(trailing)
            return request
        details = first.get("want-details-bin", b"").decode() or first.get("want-details", "")
        await context.abort(code, details, trailing)
        raise AssertionError("abort returned")

    async def meta(self, _request: bytes, context: Context) -> bytes:
        metadata = context.invocation_metadata() or ()
        return json.dumps([[k, v.hex() if isinstance(v, bytes) else v] for k, v in metadata]).encode()

    async def big(self, request: bytes, _context: Context) -> bytes:
        return bytes(bytearray(int(request)))  # pages of zeros that nobody wrote would take no memory

    async def size(self, request: bytes, _context: Context) -> bytes:
        return b"%d" % len(request)

    async def server_stream(self, request: bytes, _context: Context) -> AsyncIterator[bytes]:
        number, size = map(int, request.split())
        for index in range(number):
            yield bytes([index & 0xFF]) * size

    async def client_stream(self, requests: AsyncIterator[bytes], _context: Context) -> bytes:
        number = size = 0
        async for request in requests:
            number, size = number + 1, size + len(request)
        return b"%d %d" % (number, size)

    async def bidi_stream(self, requests: AsyncIterator[bytes], _context: Context) -> AsyncIterator[bytes]:
        async for request in requests:
            self.counts["bidi"] += 1
            yield request

    async def stats(self, request: bytes, _context: Context) -> bytes:
        if request == b"collect":
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        return json.dumps(stats(self)).encode()

    def handler(self) -> grpc.GenericRpcHandler:
        """All of them, by name."""
        unary = [self.unary, self.slow, self.release, self.status, self.meta, self.big, self.size, self.stats]
        table = {_name(method): grpc.unary_unary_rpc_method_handler(method) for method in unary}
        table["ServerStream"] = grpc.unary_stream_rpc_method_handler(self.server_stream)
        table["ClientStream"] = grpc.stream_unary_rpc_method_handler(self.client_stream)
        table["BidiStream"] = grpc.stream_stream_rpc_method_handler(self.bidi_stream)
        return grpc.method_handlers_generic_handler("test.Echo", table)


def _name(method: Callable[..., Any]) -> str:
    return method.__name__.title().replace("_", "")


def stats(echo: Echo) -> dict[str, Any]:
    """What this process holds: figures of the system, of asyncio, and objects of ``weft.wire`` by class."""
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    loop = asyncio.get_running_loop()
    alive = Counter(
        f"{type(kept).__module__}.{type(kept).__qualname__}"
        for kept in gc.get_objects()
        if str(type(kept).__module__).startswith("weft.wire")
    )
    return {
        "rss_bytes": int(fields["VmRSS"].split()[0]) << 10,
        "num_threads": int(fields["Threads"]),
        "num_descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "num_tasks": len(asyncio.all_tasks()),
        "num_timers": num_timers(loop),
        "cpu_s": time.process_time(),
        "num_slow": echo.num_slow,
        "num_buffered_bytes": getattr(echo.server, "_num_buffered_bytes", 0),
        "counts": echo.counts,
        "alive": alive,
    }


def num_timers(loop: asyncio.AbstractEventLoop) -> int:
    """Timers of asyncio's own event loop, with those that are due in this turn but have not run; 0 of another loop."""
    due = (handle for handle in getattr(loop, "_ready", ()) if isinstance(handle, asyncio.TimerHandle))
    return sum(not timer.cancelled() for timer in (*getattr(loop, "_scheduled", ()), *due))


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", choices=["weft", "grpcio"], default="weft")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop", help="asyncio counts its timers")
    parser.add_argument("--address", default="127.0.0.1:0", help="host:port; empty: none")
    parser.add_argument("--unix", default="", metavar="PATH", help="listen on this Unix socket too")
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="listen with TLS too, on a port of its own")
    parser.add_argument("--tls-key", default="", metavar="FILE")
    parser.add_argument("--tls-ca", default="", metavar="FILE", help="clients need a certificate of this authority")
    parser.add_argument("--max-message-bytes", type=int, default=64 << 20)
    parser.add_argument("--grace-s", type=float, default=5.0)
    parser.add_argument("--max-descriptors", type=int, default=0, help="open files and sockets it may have")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="NAME=NUMBER",
        help="a field of weft.wire's ServerOptions, or with --wire grpcio a channel option without its 'grpc.'",
    )  # fmt: skip
    return parser.parse_args(arguments)


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def made_server(options: argparse.Namespace) -> Any:
    """The server; it does not listen yet."""
    limits = {name: _number(value) for name, _, value in (text.partition("=") for text in options.limit)}
    if options.wire == "grpcio":
        limits = {"max_send_message_length": options.max_message_bytes} | limits
        limits = {"max_receive_message_length": options.max_message_bytes} | limits
        return grpc.aio.server(options=[("grpc.so_reuseport", 0), *((f"grpc.{k}", v) for k, v in limits.items())])
    module = importlib.import_module("weft.wire.server")
    limits.setdefault("max_message_bytes", options.max_message_bytes)
    return module.Server(options=module.ServerOptions(**limits))


def add_tls_port(server: Any, options: argparse.Namespace) -> int:
    """The port with TLS."""
    if options.wire == "grpcio":
        pair = Path(options.tls_key).read_bytes(), Path(options.tls_cert).read_bytes()
        ca = Path(options.tls_ca).read_bytes() if options.tls_ca else None
        credentials = grpc.ssl_server_credentials([pair], ca, require_client_auth=bool(ca))
        return int(server.add_secure_port("127.0.0.1:0", credentials))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.tls_cert, options.tls_key)
    context.set_alpn_protocols(["h2"])
    if options.tls_ca:
        context.load_verify_locations(options.tls_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return int(server.add_tls_port("127.0.0.1:0", context))


async def serve(options: argparse.Namespace) -> None:
    """Until it is told to stop."""
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, is_over.set)
    with contextlib.suppress(PermissionError, OSError):  # a file or /dev/null never ends in this sense
        loop.add_reader(sys.stdin.fileno(), lambda: is_over.set() if not os.read(sys.stdin.fileno(), 4096) else None)
    server = made_server(options)
    server.add_generic_rpc_handlers((Echo(server).handler(), talk_handler()))
    listening: dict[str, str | int] = {"pid": os.getpid()}
    if options.address:
        host = options.address.rpartition(":")[0]
        listening["grpc"] = f"{host}:{server.add_insecure_port(options.address)}"
    if options.unix:
        server.add_insecure_port(f"unix:{options.unix}")
        listening["unix"] = f"unix:{options.unix}"
    if options.tls_cert:
        listening["tls"] = f"127.0.0.1:{add_tls_port(server, options)}"
    await server.start()
    print(json.dumps(listening), flush=True)
    await is_over.wait()
    await server.stop(options.grace_s)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # a second one changes no exit status


def main() -> None:
    """Run it."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    options = parsed()
    if options.max_descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.max_descriptors, options.max_descriptors))
    if options.loop == "uvloop":
        uvloop = importlib.import_module("uvloop")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options))
    else:
        asyncio.run(serve(options))


if __name__ == "__main__":
    main()
