"""Compressed bodies: gzip and deflate, in both directions."""

import asyncio
import zlib
from collections.abc import Callable, Iterator, Sequence

from weft.gateway.errors import RequestError
from weft.gateway.http.body import too_large

#: ``wbits`` of zlib: gzip, and zlib's own format, which HTTP calls deflate.
_WBITS = {"gzip": 31, "deflate": 15}
_PIECE_BYTES = 1 << 20
#: Fastest: a response is compressed while its client waits.
_LEVEL = 1
#: A smaller response is not compressed.
MIN_COMPRESSED_BYTES = 1024


async def decompressed(
    parts: Sequence[bytes], encoding: str, max_bytes: int, count: Callable[[int], object]
) -> list[bytes]:
    """The content of a compressed body, made on a thread.

    Args:
        parts: The body.
        encoding: Value of ``content-encoding``.
        max_bytes: Size limit of the content.
        count: Called with the size of each piece as it is made; may raise to make no more.

    Raises:
        RequestError: The encoding is not known (415), the body is not of it (400), or its content is larger than
            ``max_bytes`` (413).
    """
    wbits = _WBITS.get(encoding)
    if wbits is None:
        raise RequestError(
            f"content-encoding '{encoding[:40]}' is not taken; send gzip, deflate, or none", http_status=415
        )
    made = _decompressed(parts, encoding, wbits)
    pieces: list[bytes] = []
    size = 0
    while (piece := await asyncio.to_thread(next, made, None)) is not None:
        size += len(piece)
        if size > max_bytes:
            raise too_large(f"more than {max_bytes} bytes when decompressed", max_bytes)
        count(len(piece))
        pieces.append(piece)
    return pieces


def _decompressed(parts: Sequence[bytes], encoding: str, wbits: int) -> Iterator[bytes]:
    """Pieces of at most twice ``_PIECE_BYTES``."""
    reader = zlib.decompressobj(wbits)
    found: list[bytes] = []
    size = 0
    try:
        for part in parts:
            rest = part
            while rest and not reader.eof:
                found.append(reader.decompress(rest, _PIECE_BYTES))
                rest = reader.unconsumed_tail
                size += len(found[-1])
                if size >= _PIECE_BYTES:
                    yield b"".join(found)
                    found, size = [], 0
    except zlib.error as error:
        raise RequestError(f"the body is not of its content-encoding {encoding}: {error}") from None
    if not reader.eof or reader.unused_data:
        what = "goes on after its end" if reader.eof else "is cut off"
        raise RequestError(f"the body, of content-encoding {encoding}, {what}")
    yield b"".join(found)


def accepted_encoding(header: str) -> str:
    """The first of gzip and deflate in the value of ``accept-encoding``; "": neither is."""
    for item in header.lower().split(","):
        name, _, weight = item.partition(";")
        if name.strip() in _WBITS and weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000"):
            return name.strip()
    return ""


async def compressed(pieces: Sequence[bytes], encoding: str) -> list[bytes]:
    """The pieces of a body, compressed on a thread."""
    return await asyncio.to_thread(_compress, pieces, _WBITS[encoding])


def _compress(pieces: Sequence[bytes], wbits: int) -> list[bytes]:
    writer = zlib.compressobj(_LEVEL, wbits=wbits)
    return [*(writer.compress(piece) for piece in pieces), writer.flush()]
