"""A peer that speaks HTTP/2 frame by frame over a blocking socket, and need not keep to the protocol.

For tests of servers (``Peer.connect``) and of clients (``Listener.accept``). Nothing is sent that the test does not ask
for, except where a method says so.
"""

import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
NAMES = (
    "DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS", "PUSH_PROMISE", "PING", "GOAWAY", "WINDOW_UPDATE",
    "CONTINUATION",
)  # fmt: skip

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITIZED = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR = range(
    7
)
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM, INADEQUATE_SECURITY, HTTP_1_1_REQUIRED = (
    range(7, 14)
)

MAX_WINDOW = 2**31 - 1
TIMEOUT_S = 10.0

Fields = Sequence[tuple[str | bytes, str | bytes]]


class Frame(NamedTuple):
    """A frame as it was read."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    def __repr__(self) -> str:
        name = NAMES[self.kind] if self.kind < len(NAMES) else str(self.kind)
        return (
            f"{name}(flags={self.flags:#x}, stream_id={self.stream_id}, {self.payload[:40]!r}, {len(self.payload)} B)"
        )

    @property
    def error_code(self) -> int:
        """Of RST_STREAM or GOAWAY."""
        return int.from_bytes(self.payload[4:8] if self.kind == GOAWAY else self.payload[:4], "big")

    @property
    def last_stream_id(self) -> int:
        """Of GOAWAY."""
        return int.from_bytes(self.payload[:4], "big") & MAX_WINDOW

    @property
    def settings(self) -> dict[int, int]:
        """Of SETTINGS."""
        return dict(struct.iter_unpack("!HI", self.payload))


class Answer(NamedTuple):
    """What came on one stream until it ended.

    Attributes:
        headers: Of the first block; {} if none came.
        messages: Whole gRPC messages, without their prefixes.
        trailers: Of the second block, or of the first if it ended the stream (trailers-only).
        reset_code: Of RST_STREAM; None if the stream ended with END_STREAM.
    """

    headers: dict[str, str]
    messages: list[bytes]
    trailers: dict[str, str]
    reset_code: int | None

    @property
    def status(self) -> int | None:
        """The gRPC status; None if there is none."""
        status = self.trailers.get("grpc-status")
        return None if status is None else int(status)


class Closed(Exception):  # noqa: N818  # what the other side did need not be an error
    """The other side has closed the connection, or reset it."""


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a frame; ``length`` is what the frame says of itself, by default the truth."""
    size = len(payload) if length is None else length
    return struct.pack("!BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def settings_frame(settings: Mapping[int, int] | Iterable[tuple[int, int]] = ()) -> bytes:
    """SETTINGS with these values, in order; a list may repeat one."""
    pairs = settings.items() if isinstance(settings, Mapping) else settings
    return frame(SETTINGS, payload=b"".join(struct.pack("!HI", *pair) for pair in pairs))


def settings_frame_ack() -> bytes:
    """The acknowledgement of SETTINGS."""
    return frame(SETTINGS, ACK)


def window_update(stream_id: int, increment: int) -> bytes:
    """WINDOW_UPDATE."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def reset(stream_id: int, code: int = CANCEL) -> bytes:
    """RST_STREAM."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def ping(opaque: bytes = b"12345678", *, ack: bool = False) -> bytes:
    """PING."""
    return frame(PING, ACK if ack else 0, 0, opaque)


def goaway(last_stream_id: int = 0, code: int = NO_ERROR, debug: bytes = b"") -> bytes:
    """GOAWAY."""
    return frame(GOAWAY, 0, 0, struct.pack("!II", last_stream_id, code) + debug)


def data(stream_id: int, payload: bytes = b"", *, end: bool = False, padding: int | None = None) -> bytes:
    """DATA; with ``padding`` it is padded by so many bytes."""
    flags = END_STREAM if end else 0
    if padding is not None:
        flags, payload = flags | PADDED, bytes([padding]) + payload + bytes(padding)
    return frame(DATA, flags, stream_id, payload)


def message(body: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """A length-prefixed gRPC message; ``length`` is what the prefix says, by default the truth."""
    return struct.pack("!BI", compressed, len(body) if length is None else length) + body


def request_fields(path: str, metadata: Fields = (), *, timeout: str = "", authority: str = "localhost") -> Fields:
    """The header fields of a gRPC request."""
    fields: list[tuple[str | bytes, str | bytes]] = [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", authority),
        ("te", "trailers"), ("content-type", "application/grpc"),
    ]  # fmt: skip
    if timeout:
        fields.append(("grpc-timeout", timeout))
    return [*fields, *metadata]


class Peer:
    """One end of a connection.

    Args:
        connected: The socket, TLS or not; owned from now on.
        timeout_s: How long one wait takes at most.

    Attributes:
        encoder, decoder: HPACK state of either direction.
    """

    def __init__(self, connected: socket.socket, timeout_s: float = TIMEOUT_S) -> None:
        self.socket = connected
        self.timeout_s = timeout_s
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder(max_header_list_size=1 << 24)
        self.settings: dict[int, int] = {}
        self._read = bytearray()
        self._is_blocked = False
        connected.settimeout(timeout_s)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        ssl_context: ssl.SSLContext | None = None,
        server_name: str = "localhost",
        timeout_s: float = TIMEOUT_S,
        receive_buffer_bytes: int = 0,
    ) -> Self:
        """Connected to ``host:port`` or ``unix:/path``; nothing is sent, but for TLS.

        ``receive_buffer_bytes`` bounds what the kernel takes for a peer that does not read.
        """
        connected: socket.socket
        if address.startswith("unix:"):
            connected = socket.socket(socket.AF_UNIX)
            target: object = address.removeprefix("unix:")
        else:
            host, _, port = address.rpartition(":")
            connected = socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            target = (host.strip("[]"), int(port))
        if receive_buffer_bytes:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        try:
            connected.settimeout(timeout_s)
            connected.connect(target)  # type: ignore[arg-type]
            if ssl_context is not None:
                connected = ssl_context.wrap_socket(connected, server_hostname=server_name)
        except BaseException:
            connected.close()
            raise
        return cls(connected, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The connection is closed; if data lie unread it is reset."""
        self.socket.close()

    def abort(self) -> None:
        """The connection is reset (TCP)."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    # ---- sending

    def send(self, *pieces: bytes) -> None:
        """These bytes are with the kernel.

        Raises:
            Closed: The other side has closed.
            TimeoutError: It does not read.
        """
        try:
            self.socket.sendall(b"".join(pieces))
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed(str(error)) from error

    def try_send(self, *pieces: bytes) -> bool:
        """Whether these bytes are with the kernel; False if the other side has closed or does not read in time."""
        try:
            self.send(*pieces)
        except (Closed, TimeoutError):
            return False
        return True

    def headers(self, stream_id: int, fields: Fields, *, end: bool = False, end_headers: bool = True) -> bytes:
        """A HEADERS frame; the encoder's table changes, so it must be sent, and in this order."""
        flags = (END_STREAM if end else 0) | (END_HEADERS if end_headers else 0)
        return frame(HEADERS, flags, stream_id, self.encoder.encode(fields, huffman=False))

    def request(
        self,
        path: str,
        body: bytes | None = b"",
        *,
        stream_id: int = 1,
        metadata: Fields = (),
        timeout: str = "",
        end: bool = True,
    ) -> bytes:
        """HEADERS and, unless ``body`` is None, DATA with one message; sized for windows and frames of the default."""
        head = self.headers(stream_id, request_fields(path, metadata, timeout=timeout), end=end and body is None)
        if body is None:
            return head
        prefixed = message(body)
        starts = range(0, len(prefixed), 1 << 14)
        last = len(starts) - 1
        pieces = [
            data(stream_id, prefixed[at : at + (1 << 14)], end=end and index == last) for index, at in enumerate(starts)
        ]
        return head + b"".join(pieces)

    # ---- handshakes

    def handshake(self, settings: Mapping[int, int] | None = None, *, window: int = 0) -> Self:
        """The client's: preface and SETTINGS are sent, the server's SETTINGS are read and acknowledged.

        ``window`` is added to that of the connection.
        """
        self.send(PREFACE, settings_frame(settings or {}), window_update(0, window) if window else b"")
        self._take_settings()
        return self

    def server_handshake(self, settings: Mapping[int, int] | None = None) -> Self:
        """The server's: the client's preface and SETTINGS are read, its own are sent."""
        preface = self._take(len(PREFACE), time.monotonic() + self.timeout_s)
        assert preface == PREFACE, preface
        self.send(settings_frame(settings or {}))
        self._take_settings()
        return self

    def _take_settings(self) -> None:
        first = self.read()
        assert first.kind == SETTINGS, first
        assert not first.flags & ACK, first
        self.settings = first.settings
        self.send(frame(SETTINGS, ACK))

    # ---- reading

    def read(self, timeout_s: float | None = None) -> Frame:
        """The next frame.

        Raises:
            Closed: The other side has closed or reset the connection.
            TimeoutError: None came in time, by default in ``timeout_s`` of the constructor.
        """
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while len(self._read) < 9:
            self._receive(deadline_s)
        high, low, kind, flags, stream_id = struct.unpack("!BHBBI", self._read[:9])
        size = 9 + (high << 16 | low)
        while len(self._read) < size:
            self._receive(deadline_s)
        payload = bytes(self._read[9:size])
        del self._read[:size]
        return Frame(kind, flags, stream_id & MAX_WINDOW, payload)

    def _take(self, size: int, deadline_s: float) -> bytes:
        while len(self._read) < size:
            self._receive(deadline_s)
        taken = bytes(self._read[:size])
        del self._read[:size]
        return taken

    def _receive(self, deadline_s: float) -> None:
        self.socket.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        try:
            piece = self.socket.recv(1 << 18)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed(str(error)) from error
        finally:
            if self.socket.fileno() >= 0:
                self.socket.settimeout(self.timeout_s)
        if not piece:
            raise Closed("end of the connection")
        self._read += piece

    def read_until(self, is_it: Callable[[Frame], bool], timeout_s: float | None = None) -> Frame:
        """The first frame that it is; those before it are dropped, SETTINGS and PING among them are acknowledged.

        Raises:
            Closed, TimeoutError: As ``read``.
        """
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while True:
            read = self.read(max(deadline_s - time.monotonic(), 1e-3))
            if is_it(read):
                return read
            self._keep_house(read)

    def _keep_house(self, read: Frame) -> None:
        """Acknowledge; keep the table of header compression in step."""
        if read.kind == SETTINGS and not read.flags & ACK:
            self.settings |= read.settings
            self.try_send(frame(SETTINGS, ACK))
        elif read.kind == PING and not read.flags & ACK:
            self.try_send(ping(read.payload, ack=True))
        elif read.kind == HEADERS:
            self.decoder.decode(self._block(read))

    def read_kind(self, kind: int, stream_id: int | None = None, timeout_s: float | None = None) -> Frame:
        """The first frame of a kind, on a stream if one is given; see ``read_until``."""
        return self.read_until(lambda read: read.kind == kind and stream_id in (None, read.stream_id), timeout_s)

    def read_headers(self, stream_id: int, timeout_s: float | None = None) -> tuple[dict[str, str], bool]:
        """The next header block of a stream, and whether it ends the stream."""
        read = self.read_kind(HEADERS, stream_id, timeout_s)
        return self._fields(read), bool(read.flags & END_STREAM)

    def _fields(self, read: Frame) -> dict[str, str]:
        return {_text(name): _text(value) for name, value in self.decoder.decode(self._block(read), raw=True)}

    def _block(self, first: Frame) -> bytes:
        block, flags = bytearray(first.payload), first.flags
        if flags & PADDED:
            block = block[1 : len(block) - block[0]]
        if flags & PRIORITIZED:
            block = block[5:]
        while not flags & END_HEADERS:
            more = self.read()
            assert (more.kind, more.stream_id) == (CONTINUATION, first.stream_id), more
            block += more.payload
            flags = more.flags
        return bytes(block)

    def read_answer(self, stream_id: int = 1, timeout_s: float | None = None, *, gives_window: bool = True) -> Answer:
        """What comes on a stream to its end; what comes on others is dropped.

        SETTINGS and PING are acknowledged, and unless told otherwise windows are kept open.

        Raises:
            Closed, TimeoutError: As ``read``.
        """
        (answer,) = self.read_answers([stream_id], timeout_s, gives_window=gives_window)
        return answer

    def read_answers(
        self, stream_ids: Iterable[int], timeout_s: float | None = None, *, gives_window: bool = True
    ) -> list[Answer]:
        """What comes on several streams to their ends, in the order given; see ``read_answer``."""
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        wanted = list(stream_ids)
        blocks: dict[int, list[dict[str, str]]] = {stream_id: [] for stream_id in wanted}
        bodies = {stream_id: bytearray() for stream_id in wanted}
        ended: dict[int, int | None] = {}
        while len(ended) < len(wanted):
            read = self.read(max(deadline_s - time.monotonic(), 1e-3))
            if read.kind == DATA and read.payload and gives_window:
                both = window_update(0, len(read.payload)), window_update(read.stream_id, len(read.payload))
                self.try_send(*both[: 1 if read.flags & END_STREAM else 2])
            if read.stream_id not in blocks:
                self._keep_house(read)
                continue
            if read.kind == HEADERS:
                blocks[read.stream_id].append(self._fields(read))
            elif read.kind == DATA:
                bodies[read.stream_id] += _unpadded(read)
            elif read.kind == RST_STREAM:
                ended.setdefault(read.stream_id, read.error_code)
            if read.kind in (HEADERS, DATA) and read.flags & END_STREAM:
                ended.setdefault(read.stream_id, None)
        return [_answer(blocks[stream_id], bodies[stream_id], ended[stream_id]) for stream_id in wanted]

    def call(self, path: str, body: bytes = b"", *, stream_id: int = 1, metadata: Fields = ()) -> Answer:
        """A unary call's answer."""
        self.send(self.request(path, body, stream_id=stream_id, metadata=metadata))
        return self.read_answer(stream_id)

    def wait_goaway(self, timeout_s: float | None = None) -> Frame:
        """The first GOAWAY; see ``read_until``."""
        return self.read_kind(GOAWAY, timeout_s=timeout_s)

    def wait_reset(self, stream_id: int, timeout_s: float | None = None) -> int:
        """The code of the first RST_STREAM on a stream; see ``read_until``."""
        return self.read_kind(RST_STREAM, stream_id, timeout_s).error_code

    def wait_closed(self, timeout_s: float | None = None) -> list[Frame]:
        """The frames until the other side has closed the connection, acknowledged where they ask for it.

        Raises:
            TimeoutError: It stays open.
        """
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        frames: list[Frame] = []
        with contextlib.suppress(Closed):
            while True:
                frames.append(self.read(max(deadline_s - time.monotonic(), 1e-3)))
                if frames[-1].kind in (SETTINGS, PING):
                    self._keep_house(frames[-1])
        return frames

    def wait_gone(self, timeout_s: float | None = None) -> None:
        """The other side has closed or reset the connection, seen without reading what it sent.

        Raises:
            TimeoutError: It is open.
        """
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        if not poll.poll(1e3 * (self.timeout_s if timeout_s is None else timeout_s)):
            raise TimeoutError("the connection is open")


class Listener:
    """Listens for one client after another, as a server that speaks frame by frame.

    Args:
        path: Of a Unix socket; by default a free port of 127.0.0.1.

    Attributes:
        address: What a channel connects to.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        if path:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.bind(path)
            self.address = f"unix:{path}"
        else:
            self.socket = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.socket.listen(128)

    def accept(self, timeout_s: float = TIMEOUT_S, ssl_context: ssl.SSLContext | None = None) -> Peer:
        """The next connection; nothing is sent, but for TLS."""
        self.socket.settimeout(timeout_s)
        accepted, _ = self.socket.accept()
        accepted.settimeout(timeout_s)
        if ssl_context is not None:
            accepted = ssl_context.wrap_socket(accepted, server_side=True)
        return Peer(accepted, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """It listens no more."""
        self.socket.close()
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def _answer(blocks: list[dict[str, str]], body: bytearray, reset_code: int | None) -> Answer:
    headers = blocks[0] if blocks else {}
    return Answer(headers, split_messages(bytes(body)), blocks[-1] if blocks else {}, reset_code)


def split_messages(body: bytes) -> list[bytes]:
    """The messages of a body; what is no whole message at its end is dropped."""
    messages, at = [], 0
    while len(body) - at >= 5:
        size = int.from_bytes(body[at + 1 : at + 5], "big")
        if len(body) - at - 5 < size:
            break
        messages.append(body[at + 5 : at + 5 + size])
        at += 5 + size
    return messages


def _unpadded(read: Frame) -> bytes:
    return read.payload[1 : len(read.payload) - read.payload[0]] if read.flags & PADDED else read.payload


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
