"""Arguments of the commands that call a router, and of ``weft key``; imports nothing heavy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import positive
from weft.cli.arguments.shared import add_json_argument, add_request_arguments, add_router_arguments
from weft.cli.arguments.types import ROUTER_PORT, graph_version, named_file, pair, reward

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: "Commands") -> None:
    """Add ``weft infer``, ``feedback``, ``rollback``, ``lock`` and ``key``."""
    _add_infer(commands)
    _add_feedback(commands)
    _add_rollback(commands)
    _add_lock(commands)
    _add_key(commands)


def _add_infer(commands: "Commands") -> None:
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
    add_request_arguments(parser)
    add_router_arguments(parser)
    add_json_argument(parser)
    parser.add_argument("--timeout-ms", type=positive, default=30_000.0, metavar="N", help="deadline; default: 30000")
    parser.add_argument("--trace", action="store_true", help="show the path taken, and when each step ran for how long")


def _add_feedback(commands: "Commands") -> None:
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
    add_router_arguments(parser)
    add_json_argument(parser)


def _add_rollback(commands: "Commands") -> None:
    parser = commands.add_parser(
        "rollback",
        help="put back what a graph served before",
        description="Put back what a graph served before its files changed, until files are loaded again.",
    )
    parser.add_argument("graph", metavar="GRAPH")
    add_router_arguments(parser)
    add_json_argument(parser)


def _add_lock(commands: "Commands") -> None:
    parser = commands.add_parser(
        "lock",
        help="write the signatures of the models that run",
        description="Write what the models of all targets take and give to a file, or compare them with one.",
        epilog="example: weft lock --url 127.0.0.1:8001 -o signatures.lock",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--url",
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
    add_json_argument(parser)
    add_channel_arguments(parser.add_argument_group("security"))


def _add_key(commands: "Commands") -> None:
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
    add_json_argument(new)
