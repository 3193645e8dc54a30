"""Arguments that several commands take; imports nothing heavy."""

import argparse

from weft.base.security.arguments import add_channel_arguments
from weft.cli.arguments.types import ROUTER_PORT, header, pair


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes a request."""
    parser.add_argument(
        "--input", action="append", default=[], type=pair, metavar="NAME=JSON", help="an input's value; @FILE reads it"
    )
    parser.add_argument(
        "--param", action="append", default=[], type=pair, metavar="NAME=VALUE", help="request parameter"
    )
    parser.add_argument("--header", action="append", default=[], type=header, metavar="NAME=VALUE", help="metadata")
    parser.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="ask for this output only; may be repeated"
    )
    parser.add_argument("--request-id", default="", metavar="ID")


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address of the router and how it is called."""
    parser.add_argument("--url", default=f"127.0.0.1:{ROUTER_PORT}", help=f"default: 127.0.0.1:{ROUTER_PORT}")
    add_channel_arguments(parser.add_argument_group("security"))


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every command has that prints facts."""
    parser.add_argument("--json", action="store_true", help="print facts as JSON")
