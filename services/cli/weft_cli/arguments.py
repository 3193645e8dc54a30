"""What each command takes on the command line; imports nothing heavy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weft_cli.argument_types import (
    graph_version,
    header,
    named_file,
    pair,
    port,
    replicas,
    reward,
    service_arguments,
    services,
)
from weft_common.security.arguments import add_channel_arguments, add_server_arguments
from weft_common.text.argument_types import not_negative, positive
from weft_mesh.service_names import MODEL_SERVICES
from weft_router.arguments import add_arguments as add_router_arguments

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

ROUTER_PORT = 8001


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
    parser.add_argument("--router-port", type=port, default=ROUTER_PORT, metavar="N", help="gRPC; 0 is any free port")
    parser.add_argument(
        "--metrics-port",
        type=port,
        metavar="N",
        help="the router's metrics; default: router port + 1",
    )
    parser.add_argument(
        "--openai-port",
        type=port,
        metavar="N",
        help="serve OpenAI's HTTP interface there too, for language models; 0 is any free port (default: do not)",
    )
    parser.add_argument(
        "--in-process",
        nargs="?",
        type=services,
        const=MODEL_SERVICES,
        default=(),
        metavar="NAME,NAME",
        help="run these services in the router's process, all of them if no name is given",
    )
    parser.add_argument(
        "--replicas",
        type=replicas,
        action="append",
        default=[],
        metavar="NAME=COUNT",
        help="start so many processes of this service; may be repeated; default: one of each",
    )
    parser.add_argument(
        "--service-args",
        type=service_arguments,
        action="append",
        default=[],
        metavar="NAME='ARGUMENTS'",
        help="more arguments of this service, for example model='--load-on-demand --warm-models 2'; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON with every endpoint and pid")
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="stop when standard input ends, so as not to outlive the parent"
    )
    parser.add_argument("--start-timeout-s", type=positive, default=180.0, metavar="S", help="default: 180")
    parser.add_argument(
        "--grace-s", type=positive, default=20.0, metavar="S", help="how long stopping may take; default: 20"
    )
    parser.add_argument(
        "--no-restart", action="store_true", help="a service that dies stays dead, and the others go on"
    )
    parser.add_argument(
        "--hang-timeout-s",
        type=not_negative,
        default=30.0,
        metavar="S",
        help="kill and restart a service that has not answered a health check for so long; 0: never; default: 30",
    )
    add_router_arguments(parser.add_argument_group("router", "poll is for models too, the rest for graphs alone"))
    add_server_arguments(parser.add_argument_group("security of the router's ports"))


def add_restart(commands: "Commands") -> None:
    """Add ``weft restart``."""
    parser = commands.add_parser(
        "restart",
        help="replace the services of a mesh on this machine without a gap",
        description="Tell a running weft up of this user to replace every service by a new process, one after another.",
    )
    parser.add_argument(
        "--router", metavar="ADDRESS", help="whose router listens there, HOST:PORT; default: the only one that runs"
    )


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
        type=named_file,
        metavar="[NAME=]PATH",
        help="like --text, with the bytes of a file; NAME is the input, where there are several",
    )
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
    parser.add_argument("--url", default=f"127.0.0.1:{ROUTER_PORT}", help=f"default: 127.0.0.1:{ROUTER_PORT}")
    parser.add_argument("--timeout-ms", type=positive, default=30_000.0, metavar="N", help="deadline; default: 30000")
    _add_security(parser)
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


def add_top(commands: "Commands") -> None:
    """Add ``weft top``."""
    parser = commands.add_parser(
        "top",
        help="show services, queues, rates and latencies as they are now",
        description="Show services, queues, rates and latencies, from the metrics of the router and of other services.",
        epilog="example: weft top --router 127.0.0.1:8002",
    )
    parser.add_argument(
        "--router",
        metavar="ADDRESS",
        help="the router's metrics, if no other service is given, and every service where a weft up of this user runs "
        f"there; default: the only weft up that runs, else 127.0.0.1:{ROUTER_PORT + 1}",
    )
    parser.add_argument(
        "--service",
        action="append",
        default=[],
        type=pair,
        metavar="NAME=ADDRESS",
        help="the metrics of a service, HOST:PORT or a URL; may be repeated",
    )
    parser.add_argument(
        "--endpoints", type=Path, metavar="FILE", help="every service of a mesh: the line that weft up --json prints"
    )
    parser.add_argument("--interval-s", type=positive, default=1.0, metavar="S", help="between frames; default: 1")
    parser.add_argument("--once", action="store_true", help="print one frame, as without a terminal")
    parser.add_argument("--json", action="store_true", help="print one frame as JSON")
    add_channel_arguments(
        parser.add_argument_group("security, of addresses that begin with https"), takes_key=False, takes_name=False
    )


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
        type=pair,
        metavar="NAME=ADDRESS",
        help="ask this service, in place of a router; may be repeated, as for the router",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    action.add_argument("--check", type=Path, metavar="FILE", help="print how the models differ from this file")
    _add_security(parser)


def add_rollback(commands: "Commands") -> None:
    """Add ``weft rollback``."""
    parser = commands.add_parser(
        "rollback",
        help="put back what a graph served before",
        description="Put back what a graph served before its files changed, until files are loaded again.",
    )
    parser.add_argument("graph", metavar="GRAPH")
    parser.add_argument("--url", default=f"127.0.0.1:{ROUTER_PORT}", help=f"default: 127.0.0.1:{ROUTER_PORT}")
    _add_security(parser)


def add_feedback(commands: "Commands") -> None:
    """Add ``weft feedback``."""
    parser = commands.add_parser(
        "feedback",
        help="tell a graph's bandits how good an answer was",
        description="Reward the steps that the bandits of a graph chose for a request.",
        epilog="example: weft feedback ranking --request-id 7f3a --reward 0.7",
    )
    parser.add_argument("graph", type=graph_version, metavar="GRAPH", help="NAME/VERSION for a path of one version")
    request = parser.add_mutually_exclusive_group(required=True)
    request.add_argument("--request-id", metavar="ID", help="id of the request")
    request.add_argument("--path", help="the path that it took, as weft infer --trace shows it")
    parser.add_argument("--reward", type=reward, required=True, metavar="X", help="0 (worst) to 1 (best)")
    parser.add_argument("--url", default=f"127.0.0.1:{ROUTER_PORT}", help=f"default: 127.0.0.1:{ROUTER_PORT}")
    _add_security(parser)


def _add_security(parser: argparse.ArgumentParser) -> None:
    add_channel_arguments(parser.add_argument_group("security"))


def add_key(commands: "Commands") -> None:
    """Add ``weft key``."""
    parser = commands.add_parser(
        "key",
        help="make a key for a client",
        description="Make a key: it is shown once, on standard output; its line for the file of --auth-keys has only "
        "its hash.",
        epilog="example: weft key new shop --add-to weft.keys > shop.key",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    new = actions.add_parser("new", help="make a key")
    new.add_argument("name", metavar="NAME", help="who will hold it")
    new.add_argument(
        "--add-to", type=Path, metavar="FILE", help="append the line to this file; default: print it on standard error"
    )


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
        "--param", action="append", default=[], type=pair, metavar="NAME=VALUE", help="request parameter"
    )
    parser.add_argument("--header", action="append", default=[], type=header, metavar="NAME=VALUE", help="metadata")
    parser.add_argument(
        "--shape", action="append", default=[], type=pair, metavar="NAME=1,3", help="an input's shape, values unknown"
    )
    parser.add_argument(
        "--input", action="append", default=[], type=pair, metavar="NAME=JSON", help="an input's value; @FILE reads it"
    )
    parser.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="ask for this output only; may be repeated"
    )
    parser.add_argument("--request-id", default="", metavar="ID")
    parser.add_argument("--priority", type=int, metavar="N", help="the request parameter of that name")
    parser.add_argument("--remaining-ms", type=positive, metavar="N", help="the client's deadline; default: none")
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
