"""Selects the gRPC implementation, Weft's or grpcio's; imports nothing heavy."""

import argparse
import enum
import os

from weft.base.errors import InvalidArgumentError

_VARIABLE = "WEFT_WIRE"


class WireName(enum.StrEnum):
    """An implementation of gRPC over HTTP/2; they interoperate."""

    WEFT = "weft"
    GRPCIO = "grpcio"


#: Unless the environment says otherwise.
DEFAULT_WIRE = WireName.WEFT


def default_wire() -> WireName:
    """The default implementation: ``WEFT_WIRE``, else ``weft``. Raises InvalidArgumentError."""
    name = os.environ.get(_VARIABLE) or DEFAULT_WIRE
    try:
        return WireName(name)
    except ValueError:
        raise InvalidArgumentError(f"{_VARIABLE} '{name}' must be one of {', '.join(WireName)}") from None


def add_wire_argument(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add ``--wire``."""
    parser.add_argument(
        "--wire",
        type=_wire,
        default=os.environ.get(_VARIABLE) or str(DEFAULT_WIRE),  # checked like a given one
        metavar=f"{{{','.join(WireName)}}}",
        help="implementation of gRPC for its ports and its calls: Weft's own, or grpcio's (default %(default)s)",
    )


def _wire(text: str) -> WireName:
    try:
        return WireName(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' must be one of {', '.join(WireName)}") from None
