"""Metadata of calls as fields: binary values in base64, reserved names left out."""

import base64
import binascii
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
