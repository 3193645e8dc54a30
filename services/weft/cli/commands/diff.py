"""``weft diff``: what a change of a graph means for its clients, its users and its costs."""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import add
from weft.changes.diff import CLASSES, compare, json_of, markdown_of, text_of
from weft.cli.arguments import add_json_argument
from weft.cli.plan import sides_or_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft diff``."""
    option = partial(add, parser)
    parser.description = (
        "Compare two graphs: the clients that break, the steps, the users that move, calls and time at most. A graph "
        "is a file, NAME or NAME/VERSION, or REVISION:GRAPH, as a revision of Git has it with its repository."
    )
    parser.epilog = "example: weft diff main:triage triage --markdown --exit-code"
    option("before BEFORE", "the graph as it was")
    option("after AFTER", "the graph as it would be")
    option("--repository DIR", "models and other graphs; default: that around a file, else ./model_repository", Path)
    option("--lock FILE", "take the signatures of models from this file of weft lock", Path)
    option("--url ADDRESS", "NAME and NAME/VERSION are what this router serves")
    option("--markdown", "for a pull request")
    add_json_argument(parser)
    text = f"exit with 1 if there is a change of this class: {', '.join(CLASSES)}; without a value: breaking"
    option("--exit-code CLASS ...", text, nargs="?", const="breaking", choices=CLASSES)
    add_channel_arguments(parser.add_argument_group("security"))


def run(options: argparse.Namespace) -> int:
    """Compare; 0 done, 1 a graph has errors, or --exit-code applies, 2 there is no such graph."""
    with tempfile.TemporaryDirectory() as folder:
        sides = sides_or_status((options.before, options.after), options, Path(folder))
        if isinstance(sides, int):
            return sides
        found = [*compare(*(plan for plan, _ in sides))]
    render = json_of if options.json else markdown_of if options.markdown else text_of
    sys.stdout.write(render(options.before, options.after, found))
    return int(any(not set(one.classes).isdisjoint(options.exit_code) for one in found))
