"""A large message in pieces, so that it need not be copied into one."""

from collections.abc import Sequence


class Parts:
    """Bytes in pieces, which are sent, or were received, as they are.

    Args:
        pieces: In order, not to be changed any more.

    Attributes:
        pieces: The pieces.
    """

    __slots__ = ("_num_bytes", "pieces")

    def __init__(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        self.pieces = pieces
        self._num_bytes = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._num_bytes

    def joined(self) -> bytes:
        """All in one piece."""
        return b"".join(self.pieces)
