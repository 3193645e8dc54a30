"""A connection in memory, for either end of the wire."""

from weft.wire.transport import Http2Protocol


class MemoryTransport:
    """Takes what a protocol writes; closing is told in the next turn of the event loop, as transports do."""

    def __init__(self, protocol: Http2Protocol) -> None:
        self.written = bytearray()
        self._protocol = protocol
        self._is_closing = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int = 0, low: int = 0) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: bytes | memoryview) -> None:
        if not self._is_closing:
            self.written += data

    def writelines(self, pieces: list[bytes | memoryview]) -> None:
        for piece in pieces:
            self.write(piece)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self, error: Exception | None = None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._protocol.loop.call_soon(self._protocol.connection_lost, error)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    abort = close
