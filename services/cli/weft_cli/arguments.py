"""What each command takes on the command line; imports nothing heavy."""

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from weft_router.arguments import add_arguments as add_router_arguments

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

ROUTER_PORT = 8001
_HEADER = re.compile(r"[\w.-]+", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port; give 0 (any free one) to 65535")
    return port


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=VALUE")
    return name, value


def _header(text: str) -> tuple[str, str]:
    name, value = _pair(text)
    if not _HEADER.fullmatch(name) or name.lower().endswith("-bin") or not (value.isascii() and value.isprintable()):
        raise argparse.ArgumentTypeError(
            f"'{text}' cannot be sent as metadata; a name is of letters, digits, '_', '-' and '.', a value is ASCII"
        )
    return name.lower(), value


def _named_file(text: str) -> tuple[str, Path]:
    """Input and file; "" is the input that is left open. A file whose own name has a "=" is found."""
    name, separator, path = text.partition("=")
    return (name, Path(path)) if separator and path and not Path(text).exists() else ("", Path(text))


def _reward(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no reward; give a number from 0 (worst) to 1 (best)")
    return value


def _graph_version(text: str) -> str:
    name, slash, version = text.partition("/")
    if not name or (slash and not _VERSION.fullmatch(version)):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME or NAME/VERSION")
    return text


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
    add_router_arguments(parser.add_argument_group("router"))


def add_infer(commands: "Commands") -> None:
    """Add ``weft infer``."""
    parser = commands.add_parser(
        "infer",
        help="send one request to a graph or model",
        description="Send one request and print the answer.",
        epilog="""example: weft infer triage --text "The parcel never came." --trace""",
    )
    parser.add_argument("model", metavar="GRAPH", help="graph or model; NAME/VERSION for one version")
    parser.add_argument(
        "--text", action="append", default=[], help="fills the only text input; once for each row of a batch"
    )
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        type=_named_file,
        metavar="[NAME=]PATH",
        help="like --text, with the bytes of a file; NAME is the input, where there are several",
    )
    parser.add_argument(
        "--input", action="append", default=[], type=_pair, metavar="NAME=JSON", help="an input's value; @FILE reads it"
    )
    parser.add_argument(
        "--param", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="request parameter"
    )
    parser.add_argument("--header", action="append", default=[], type=_header, metavar="NAME=VALUE", help="metadata")
    parser.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="ask for this output only; may be repeated"
    )
    parser.add_argument("--request-id", default="", metavar="ID")
    parser.add_argument("--url", default=f"127.0.0.1:{ROUTER_PORT}", help=f"default: 127.0.0.1:{ROUTER_PORT}")
    parser.add_argument("--timeout-ms", type=_positive, default=30_000.0, metavar="N", help="deadline; default: 30000")
    parser.add_argument("--trace", action="store_true", help="show the path taken, and when each step ran for how long")


def add_check(commands: "Commands") -> None:
    """Add ``weft check``."""
    parser = commands.add_parser(
        "check",
        help="check graph.pbtxt and config.pbtxt files",
        description="Report every error of graph and configuration files, without a server.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder to search")
    parser.add_argument(
        "--repository",
        type=Path,
        metavar="DIR",
        help="models and other graphs; default: the repository that a graph is in, else ./model_repository",
    )
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="check graphs against the signatures in this file of weft lock"
    )
    parser.add_argument("--format", choices=("text", "json", "github"), default="text", help="default: text")


def add_lock(commands: "Commands") -> None:
    """Add ``weft lock``."""
    parser = commands.add_parser(
        "lock",
        help="write the signatures of the models that run",
        description="Write what the models of all targets take and give to a file, or compare them with one.",
        epilog="example: weft lock --router 127.0.0.1:8001 -o signatures.lock",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--router",
        default=f"127.0.0.1:{ROUTER_PORT}",
        metavar="ADDRESS",
        help=f"whose targets are asked; default: 127.0.0.1:{ROUTER_PORT}",
    )
    source.add_argument(
        "--target",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=ADDRESS",
        help="ask this service, in place of a router; may be repeated, as for the router",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    action.add_argument("--check", type=Path, metavar="FILE", help="print how the models differ from this file")


def add_rollback(commands: "Commands") -> None:
    """Add ``weft rollback``."""
    parser = commands.add_parser(
        "rollback",
        help="put back what a graph served before",
        description="Put back what a graph served before its files changed, until files are loaded again.",
    )
    parser.add_argument("graph", metavar="GRAPH")
    parser.add_argument("--url", default=f"127.0.0.1:{ROUTER_PORT}", help=f"default: 127.0.0.1:{ROUTER_PORT}")


def add_feedback(commands: "Commands") -> None:
    """Add ``weft feedback``."""
    parser = commands.add_parser(
        "feedback",
        help="tell a graph's bandits how good an answer was",
        description="Reward the steps that the bandits of a graph chose for a request.",
        epilog="example: weft feedback ranking --request-id 7f3a --reward 0.7",
    )
    parser.add_argument("graph", type=_graph_version, metavar="GRAPH", help="NAME/VERSION for a path of one version")
    request = parser.add_mutually_exclusive_group(required=True)
    request.add_argument("--request-id", metavar="ID", help="id of the request")
    request.add_argument("--path", help="the path that it took, as weft infer --trace shows it")
    parser.add_argument("--reward", type=_reward, required=True, metavar="X", help="0 (worst) to 1 (best)")
    parser.add_argument("--url", default=f"127.0.0.1:{ROUTER_PORT}", help=f"default: 127.0.0.1:{ROUTER_PORT}")


def _add_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", metavar="GRAPH", help="a graph file, or a graph's name; NAME/VERSION for one version")
    parser.add_argument(
        "--repository",
        type=Path,
        metavar="DIR",
        help="models and other graphs; default: the repository that the file is in, else ./model_repository",
    )
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="take the signatures of models from this file of weft lock"
    )


def add_draw(commands: "Commands") -> None:
    """Add ``weft draw``."""
    parser = commands.add_parser(
        "draw",
        help="draw a graph",
        description="Draw a graph: its nodes as nested boxes, its tensors as edges. No server is needed.",
        epilog="example: weft draw digits -o digits.svg",
    )
    _add_graph(parser)
    parser.add_argument(
        "--format", choices=("mermaid", "dot", "svg", "text"), help="default: as the suffix of -o says, else mermaid"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")


def add_explain(commands: "Commands") -> None:
    """Add ``weft explain``."""
    parser = commands.add_parser(
        "explain",
        help="show which path a request takes through a graph",
        description="Show which path a request takes through a graph, as far as it is known before a model answers.",
        epilog="example: weft explain triage --param team=shipping --input TEXT='\"The parcel never came.\"'",
    )
    _add_graph(parser)
    parser.add_argument(
        "--param", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="request parameter"
    )
    parser.add_argument("--header", action="append", default=[], type=_header, metavar="NAME=VALUE", help="metadata")
    parser.add_argument(
        "--shape", action="append", default=[], type=_pair, metavar="NAME=1,3", help="an input's shape, values unknown"
    )
    parser.add_argument(
        "--input", action="append", default=[], type=_pair, metavar="NAME=JSON", help="an input's value; @FILE reads it"
    )
    parser.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="ask for this output only; may be repeated"
    )
    parser.add_argument("--request-id", default="", metavar="ID")
    parser.add_argument("--priority", type=int, metavar="N", help="the request parameter of that name")
    parser.add_argument("--remaining-ms", type=_positive, metavar="N", help="the client's deadline; default: none")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def add_convert(commands: "Commands") -> None:
    """Add ``weft convert``."""
    parser = commands.add_parser(
        "convert",
        help="make a graph of a KServe InferenceGraph or a Seldon SeldonDeployment",
        description="Write graph.pbtxt for a KServe InferenceGraph or a Seldon Core 1 SeldonDeployment. What a person "
        "has to decide is a comment there that begins with CHECK, and a warning.",
        epilog="example: weft convert inference-graph.yaml --repository model_repository -o model_repository/graphs",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML or JSON; - is standard input")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="a .pbtxt file, or a folder for FOLDER/NAME/1/graph.pbtxt; default: standard output",
    )
    types = parser.add_mutually_exclusive_group()
    types.add_argument(
        "--lock",
        "--signatures",
        dest="signatures",
        type=Path,
        metavar="FILE",
        help="take the signatures of models from this file of weft lock",
    )
    types.add_argument("--repository", type=Path, metavar="DIR", help="take them from this model repository")
