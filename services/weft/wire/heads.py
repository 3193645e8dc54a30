"""Request and response headers as gRPC reads them: method, status, timeout, metadata."""

import base64
import binascii
import math
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from weft.wire.interface import StatusCode
from weft.wire.messages import ACCEPTED, ENCODINGS, STATUS_BY_NUMBER, decode_message, status_of_http

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

#: Fields of the protocol itself, which no call sees as metadata.
RESERVED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "grpc-accept-encoding",
        "grpc-encoding",
        "grpc-message",
        "grpc-status",
        "grpc-timeout",
        "host",
        "te",
    }
)
#: An entry of a header table, which costs a byte to name, may be a list of thousands of values.
_MAX_VALUES = 512
_KEY = re.compile(r"[0-9a-z_.-]+")


def decode_metadata(fields: Iterable[tuple[str, str]]) -> Metadata:
    """Return the metadata among header fields, in order. Raises ValueError: bad base64, or too many."""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if len(metadata) >= _MAX_VALUES:
            raise ValueError(f"the call has more than {_MAX_VALUES} values of metadata")
        if name in RESERVED or name.startswith(":"):
            continue
        if name.endswith("-bin"):
            if value.count(",") >= _MAX_VALUES:
                raise ValueError(f"the call has more than {_MAX_VALUES} values of metadata")
            metadata += ((name, _binary(name, part)) for part in value.split(","))
        else:
            metadata.append((name, value.strip(" \t")))
    return tuple(metadata)


def encode_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> list[tuple[str, str]]:
    """Metadata as header fields. Raises ValueError that names what cannot be sent."""
    fields: list[tuple[str, str]] = []
    for key, value in metadata:
        if not (isinstance(key, str) and isinstance(value, str | bytes)):
            raise ValueError(f"metadata are pairs of str and str or bytes, not {type(key)} and {type(value)}")
        if not _KEY.fullmatch(key) or key in RESERVED:
            raise ValueError(f"metadata key {key!r} is invalid: give 0-9, a-z, _, - and ., and no name of gRPC's own")
        if key.endswith("-bin"):
            data = value.encode() if isinstance(value, str) else value
            fields.append((key, base64.b64encode(data).rstrip(b"=").decode("ascii")))
            continue
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        if not (text.isascii() and (text.isprintable() or not text)):
            raise ValueError(
                f"the value of metadata key {key!r} is not printable ASCII: give it a key that ends with -bin"
            )
        fields.append((key, text.strip(" ")))
    return fields


def _binary(name: str, value: str) -> bytes:
    value = value.strip()
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"the value of metadata key {name!r} is no base64") from None


_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_DIGITS = 8
_MAX_TIMEOUT = "99999999H"


def decode_timeout(value: str) -> float | None:
    """The timeout in seconds; None if the value is no timeout."""
    digits, unit = value[:-1], value[-1:]
    if not (digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_DIGITS and unit in _SECONDS):
        return None
    return int(digits) * _SECONDS[unit]


def encode_timeout(timeout_s: float) -> str:
    """Encode a timeout, rounded up to about three significant digits, so that header blocks repeat.

    Servers need not decode a repeated block again.
    """
    if timeout_s <= 0:
        return "0n"
    for unit, seconds in (("n", 1e-9), ("u", 1e-6), ("m", 1e-3), ("S", 1.0), ("M", 60.0), ("H", 3600.0)):
        count = timeout_s / seconds
        if count < 100_000 or unit == "H":
            number = math.ceil(count - 1e-9)
            step = 10 ** max(0, len(str(number)) - 3)
            number = -(-number // step) * step
            return f"{number}{unit}" if number < 10**_MAX_DIGITS else _MAX_TIMEOUT
    raise AssertionError


Fields = tuple[tuple[str, str], ...]

_VALUE_COST_BYTES = 64

CONTENT_TYPE = "application/grpc"


def is_grpc(content_type: str) -> bool:
    """Whether a content type is that of gRPC, with any format of messages."""
    return content_type == CONTENT_TYPE or content_type.startswith(("application/grpc+", "application/grpc;"))


class RequestHead:
    """Parsed request headers; made once for a header block that repeats.

    Attributes:
        http_status: HTTP status to answer if this is no gRPC call; else 200.
        failure: Status and message if the call cannot begin; None: it can.
        metadata_bytes: Approximate memory that the metadata take.
    """

    __slots__ = (
        "accepted", "encoding", "failure", "http_status", "metadata", "metadata_bytes", "path", "resolved", "timeout_s",
    )  # fmt: skip

    def __init__(self, fields: Fields, *, is_too_large: bool = False) -> None:
        values = dict(fields)
        self.path = values.get(":path", "")
        self.timeout_s: float | None = None
        self.encoding = values.get("grpc-encoding", "identity")
        self.accepted = values.get("grpc-accept-encoding", "")
        self.metadata: Metadata = ()
        self.metadata_bytes = 0
        self.resolved: Any = None
        self.http_status = 200
        self.failure: tuple[StatusCode, str] | None = None
        if values.get(":method") != "POST":
            self.http_status = 405
        elif not is_grpc(values.get("content-type", "")):
            self.http_status = 415
        elif is_too_large:
            self.failure = StatusCode.RESOURCE_EXHAUSTED, "the metadata of the call is larger than this server takes"
        else:
            self._read_call(fields, values)

    def _read_call(self, fields: Fields, values: dict[str, str]) -> None:
        timeout = values.get("grpc-timeout")
        if timeout is not None:
            self.timeout_s = decode_timeout(timeout)
            if self.timeout_s is None:
                self.failure = StatusCode.INTERNAL, f"grpc-timeout '{timeout}' is no number with a unit"
        if self.encoding not in ENCODINGS:
            text = f"grpc-encoding '{self.encoding}' is not supported; this server reads {ACCEPTED}"
            self.failure = StatusCode.UNIMPLEMENTED, text
        try:
            self.metadata = decode_metadata(fields)
        except ValueError as error:
            self.failure = StatusCode.INTERNAL, str(error)
        if self.metadata:
            num_values = len(self.metadata)
            self.metadata_bytes = _VALUE_COST_BYTES * num_values + sum([len(value) for _, value in self.metadata])


class ResponseHead:
    """Parsed response headers or trailers; made once for a header block that repeats.

    Attributes:
        http_status: 0 in trailers.
        fault: Why this is no gRPC response; "" if it is one.
    """

    __slots__ = ("encoding", "fault", "http_status", "message", "metadata", "status")

    def __init__(self, fields: Fields) -> None:
        values = dict(fields)
        self.http_status = int(values.get(":status", "0"))
        self.encoding = values.get("grpc-encoding", "identity")
        self.status: StatusCode | None = None
        self.message = decode_message(values.get("grpc-message", ""))
        self.metadata: Metadata = ()
        self.fault = ""
        number = values.get("grpc-status")
        if number is not None:
            is_number = number.isdecimal() and number.isascii() and len(number) < 6
            self.status = STATUS_BY_NUMBER.get(int(number), StatusCode.UNKNOWN) if is_number else StatusCode.UNKNOWN
            if not is_number:
                self.message = f"grpc-status '{number}' is no number"
        elif self.http_status and self.http_status != 200 and self.http_status >= 200:
            self.status = status_of_http(self.http_status)
            self.message = f"the server answered with HTTP status {self.http_status}"
        elif self.http_status == 200 and not is_grpc(values.get("content-type", "")):
            self.fault = f"the answer has content-type '{values.get('content-type', '')}', which is not gRPC's"
        try:
            self.metadata = decode_metadata(fields)
        except ValueError as error:
            self.fault = str(error)
