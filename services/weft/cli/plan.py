"""Compiles the graph that a command names, or explains why it cannot."""

import argparse
import sys

from weft.base.errors import WeftError
from weft.base.text.pbtxt import PbtxtError, render
from weft.language import GraphError, GraphPlan
from weft.tools.offline import load_plan


def plan_or_status(options: argparse.Namespace) -> GraphPlan | int:
    """Compile ``options.graph``, or print the reason and return the command's exit status.

    1: the graph has errors. 2: there is no such graph, or a file cannot be read.
    """
    try:
        return load_plan(options.graph, options.repository, options.lock)
    except (GraphError, PbtxtError) as error:
        print(render(error.diagnostics), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"weft {options.command}: cannot read '{error.filename}': {error.strerror}", file=sys.stderr)
    except WeftError as error:
        print(f"weft {options.command}: {error.message}", file=sys.stderr)
    return 2
