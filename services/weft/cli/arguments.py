"""Arguments that several commands take; imports nothing heavy."""

import argparse
from pathlib import Path

from weft.base.security.arguments import add_channel_arguments
from weft.cli.argument_types import ROUTER_PORT, header, pair


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


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a graph, and where the models that it calls are described."""
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


def model_control(options: argparse.Namespace) -> list[str]:
    """Arguments of model services from those of ``weft up`` and ``edge``, for how models are loaded and completed."""
    control = {
        "poll": ["--model-control-mode=poll", f"--repository-poll-secs={options.repository_poll_secs}"],
        "explicit": ["--model-control-mode=explicit", "--load-model=*"],
    }
    completion = ["--disable-auto-complete-config"] if options.disable_auto_complete_config else []
    return [*control.get(options.model_control_mode, []), *completion]
