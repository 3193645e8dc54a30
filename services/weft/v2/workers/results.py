"""What each worker has answered to the same question."""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from weft.base.errors import WeftError
from weft.v2.workers.peer import error_bytes, error_from

#: Index of the worker, whether it raised, bytes that follow.
_HEAD = struct.Struct("!H?I")


class Answer(NamedTuple):
    """The answer of one worker.

    Attributes:
        worker: Its index, from 1.
        payload: What it answered; b"" where it raised.
        error: What it raised.
    """

    worker: int
    payload: bytes = b""
    error: WeftError | None = None


def pack(answers: Iterable[Answer]) -> bytes:
    """The answers as one message."""
    parts = []
    for worker, payload, error in answers:
        body = payload if error is None else error_bytes(error)
        parts.append(_HEAD.pack(worker, error is not None, len(body)) + body)
    return b"".join(parts)


def unpack(message: bytes) -> Iterator[Answer]:
    """The answers of a message that ``pack`` made."""
    at = 0
    while at < len(message):
        worker, is_error, size_bytes = _HEAD.unpack_from(message, at)
        at += _HEAD.size
        body = message[at : at + size_bytes]
        at += size_bytes
        yield Answer(worker, error=error_from(body)) if is_error else Answer(worker, body)
