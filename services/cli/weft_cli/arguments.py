"""What each command takes on the command line; imports nothing heavy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

ROUTER_PORT = 8001


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port; give 0 (any free one) to 65535")
    return port


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=VALUE")
    return name, value


def add_up(commands: "Commands") -> None:
    """Add ``weft up``."""
    parser = commands.add_parser(
        "up",
        help="start the mesh on this machine",
        description="Start preprocess, model, postprocess and router as local processes; stop all of them at Ctrl-C.",
    )
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), metavar="DIR", help="default: ./model_repository"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address the router listens on; the others stay local")
    parser.add_argument("--router-port", type=_port, default=ROUTER_PORT, metavar="N", help="gRPC; 0 is any free port")
    parser.add_argument(
        "--metrics-port",
        type=_port,
        metavar="N",
        help="the router's metrics; default: router port + 1",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON with every endpoint and pid")
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="stop when standard input ends, so as not to outlive the parent"
    )
    parser.add_argument("--start-timeout-s", type=_positive, default=180.0, metavar="S", help="default: 180")
    parser.add_argument(
        "--grace-s", type=_positive, default=20.0, metavar="S", help="how long stopping may take; default: 20"
    )


def add_infer(commands: "Commands") -> None:
    """Add ``weft infer``."""
    parser = commands.add_parser(
        "infer",
        help="send one request to a graph or model",
        description="Send one request and print the answer.",
        epilog="""example: weft infer triage --text "The parcel never came." --param team=care --trace""",
    )
    parser.add_argument("model", metavar="GRAPH", help="graph or model; NAME/VERSION for one version")
    parser.add_argument(
        "--text", action="append", default=[], help="fills the only text input; once for each row of a batch"
    )
    parser.add_argument("--file", action="append", default=[], type=Path, help="like --text, with the bytes of a file")
    parser.add_argument(
        "--input", action="append", default=[], type=_pair, metavar="NAME=JSON", help="value of one input"
    )
    parser.add_argument(
        "--param", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="request parameter"
    )
    parser.add_argument("--url", default=f"127.0.0.1:{ROUTER_PORT}", help=f"default: 127.0.0.1:{ROUTER_PORT}")
    parser.add_argument("--timeout-ms", type=_positive, default=30_000.0, metavar="N", help="deadline; default: 30000")
    parser.add_argument("--trace", action="store_true", help="show the path taken and the milliseconds of each step")


def add_check(commands: "Commands") -> None:
    """Add ``weft check``."""
    parser = commands.add_parser(
        "check",
        help="check graph.pbtxt and config.pbtxt files",
        description="Report every error of graph and configuration files, without a server.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder to search")
    parser.add_argument(
        "--repository", type=Path, metavar="DIR", help="check names and types against this repository's models"
    )
    parser.add_argument("--format", choices=("text", "json", "github"), default="text", help="default: text")
