"""Compiles the graphs that a command names, or explains why it cannot."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.base.errors import WeftError
from weft.base.text.pbtxt import PbtxtError, render
from weft.changes.diff_sides import check_out, fetch_served
from weft.language import GraphError, GraphPlan
from weft.tools.offline import load_plan
from weft.v2.security.channel import channel_security


def plan_or_status(options: argparse.Namespace) -> GraphPlan | int:
    """Compile ``options.graph``, or print the reason and return the command's exit status.

    1: the graph has errors. 2: there is no such graph, or a file cannot be read.
    """
    try:
        return load_plan(options.graph, options.repository, options.lock)
    except (GraphError, PbtxtError) as error:
        print(render(error.diagnostics), file=sys.stderr)
        return 1
    except BrokenPipeError:  # nobody reads the output, which is no file
        raise
    except OSError as error:
        print(f"weft {options.command}: cannot read '{error.filename}': {error.strerror}", file=sys.stderr)
    except WeftError as error:
        print(f"weft {options.command}: {error.message}", file=sys.stderr)
    return 2


def sides_or_status(
    graphs: Sequence[str], options: argparse.Namespace, folder: Path
) -> list[tuple[GraphPlan, str]] | int:
    """Compile each as ``plan_or_status``, with its file or name.

    ``REVISION:GRAPH``, and with ``options.url`` what a router serves, are written into ``folder``.
    """
    sides = []
    for number, graph in enumerate(graphs):
        own = argparse.Namespace(**vars(options) | {"graph": graph})
        try:
            _fetch(own, folder / str(number))
        except WeftError as error:
            print(f"weft {options.command}: '{graph}': {error.message}", file=sys.stderr)
            return 2
        plan = plan_or_status(own)
        if isinstance(plan, int):
            if len(graphs) > 1:
                print(f"weft {options.command}: '{graph}' cannot be compared", file=sys.stderr)
            return plan
        sides.append((plan, own.graph))
    return sides


def _fetch(options: argparse.Namespace, folder: Path) -> None:
    """Write a graph that is not in files here into ``folder``, and name it in the options."""
    revision, _, path = options.graph.partition(":")
    if Path(options.graph).exists():
        return
    if revision and path:
        options.graph, options.repository = check_out(revision, path, options.repository, folder)
    elif getattr(options, "url", None) is not None:
        fetching = fetch_served(options.url, channel_security(options), options.graph, folder)
        options.repository, options.lock = folder, asyncio.run(fetching)
