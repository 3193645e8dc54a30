"""``weft lsp``: a language server for editors."""

import argparse
import os
import sys

from weft.base.text.argument_types import add
from weft.cli.arguments import port
from weft.tools.lsp.server import GraphServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft lsp``."""
    parser.description = (
        "Speak the Language Server Protocol on standard input and output, for graph.pbtxt and config.pbtxt: errors as "
        "you type, completion, documentation, definitions, layout. An editor starts it."
    )
    parser.epilog = "example: weft lsp"
    add(parser, "--tcp PORT", "serve one editor on this port of 127.0.0.1 instead", port)


def run(options: argparse.Namespace) -> int:
    """Serve one editor until it leaves; 0."""
    server = GraphServer()
    if options.tcp is not None:
        server.start_tcp("127.0.0.1", options.tcp)
        return 0
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what a model's code prints is no answer
        server.start_io(sys.stdin.buffer, answers)
    return 0
