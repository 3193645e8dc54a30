"""Metadata of calls as fields: binary values in base64, reserved names left out."""

import base64
import binascii
import math
import re
from collections.abc import Iterable
from typing import TypeAlias

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
    """The metadata among fields, in their order, without white space at the ends of values.

    Raises:
        ValueError: A binary value is no base64, or there are too many values.
    """
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
    """Metadata as fields.

    Raises:
        ValueError: A key or value cannot be sent; the message says which.
    """
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
    """A timeout as a value, rounded up to about three significant digits, so that values repeat.

    Repeated values make repeated field blocks, which servers need not decode again.
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
