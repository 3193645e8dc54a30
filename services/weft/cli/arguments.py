"""Arguments that several commands take; imports nothing heavy."""

import argparse
from pathlib import Path

from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import add
from weft.cli.argument_types import ROUTER_PORT, header, pair


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes a request."""
    add(parser, "--input NAME=JSON ...", "an input's value; @FILE reads it", pair)
    add(parser, "--param NAME=VALUE ...", "request parameter", pair)
    add(parser, "--header NAME=VALUE ...", "metadata", header)
    add(parser, "--output NAME ...", "ask for this output only; may be repeated")
    add(parser, "--request-id ID", "", default="")


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the address of the router and how it is called."""
    add(parser, "--url URL", f"default: 127.0.0.1:{ROUTER_PORT}", default=f"127.0.0.1:{ROUTER_PORT}")
    add_channel_arguments(parser.add_argument_group("security"))


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every command has that prints facts."""
    add(parser, "--json", "print facts as JSON")


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a graph, and where the models that it calls are described."""
    add(parser, "graph GRAPH", "a graph file, or a graph's name; NAME/VERSION for one version")
    add(
        parser,
        "--repository DIR",
        "models and other graphs; default: the repository that the file is in, else ./model_repository",
        Path,
    )
    add(parser, "--lock FILE", "take the signatures of models from this file of weft lock", Path)


def model_control(options: argparse.Namespace) -> list[str]:
    """Arguments of model services from those of ``weft up`` and ``edge``, for how models are loaded and completed."""
    control = {
        "poll": ["--model-control-mode=poll", f"--repository-poll-secs={options.repository_poll_secs}"],
        "explicit": ["--model-control-mode=explicit", "--load-model=*"],
    }
    completion = ["--disable-auto-complete-config"] if options.disable_auto_complete_config else []
    return [*control.get(options.model_control_mode, []), *completion]
