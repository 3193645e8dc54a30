"""Compiles the graphs that a command names, or explains why it cannot."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.base.errors import WeftError
from weft.base.text.pbtxt import PbtxtError, render
from weft.changes.diff_sides import check_out, fetch_served
from weft.language import GraphError, GraphPlan
from weft.tools.offline import load_plan
from weft.v2.client.v2_client import V2Client
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
        try:
            found = _fetched(graph, options, folder / str(number))
        except WeftError as error:
            print(f"weft {options.command}: '{graph}': {error.message}", file=sys.stderr)
            return 2
        plan = plan_or_status(argparse.Namespace(**vars(options) | {"graph": graph} | found))
        if isinstance(plan, int):
            if len(graphs) > 1:
                print(f"weft {options.command}: '{graph}' cannot be compared", file=sys.stderr)
            return plan
        sides.append((plan, found.get("graph", graph)))
    return sides


def _fetched(graph: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write a graph that is not in files here into ``folder``; return the options that find it there."""
    revision, _, path = graph.partition(":")
    if revision and path and not Path(graph).exists():
        graph, repository = check_out(revision, path, options.repository, folder)
        return {"graph": graph, "repository": repository}
    if getattr(options, "url", None) is None or Path(graph).exists():
        return {}

    async def fetched() -> Path:
        async with V2Client(options.url, security=channel_security(options)) as router:
            return await fetch_served(router, graph, folder)

    return {"repository": folder, "lock": asyncio.run(fetched())}
