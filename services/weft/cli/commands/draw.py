"""``weft draw``: a graph as a picture."""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from weft.base.text.argument_types import add
from weft.changes.diff import step_marks
from weft.cli.arguments import add_graph_arguments
from weft.cli.plan import sides_or_status
from weft.language.draw import FORMATS
from weft.language.draw.build import build_both, build_diagram

_BY_SUFFIX = {".mmd": "mermaid", ".mermaid": "mermaid", ".dot": "dot", ".gv": "dot", ".svg": "svg", ".txt": "text"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft draw``."""
    option = partial(add, parser)
    parser.description = "Draw a graph: its nodes as nested boxes, its tensors as edges. No server is needed."
    parser.epilog = "example: weft draw digits -o digits.svg"
    add_graph_arguments(parser)
    option("--against GRAPH", "draw this, as it was before, beside it, and what changed in colour; as for weft diff")
    option("--format", "default: as the suffix of -o says, else mermaid", choices=("mermaid", "dot", "svg", "text"))
    option("-o --output FILE", "default: standard output", Path)


def run(options: argparse.Namespace) -> int:
    """Draw the graph; 0 done, 1 it has errors or the file cannot be written, 2 there is no such graph or format."""
    suffix = options.output.suffix.lower() if options.output is not None else ""
    if suffix and options.format is None and suffix not in _BY_SUFFIX:
        known = ", ".join(_BY_SUFFIX)
        print(f"weft draw: no drawing is a '{suffix}' file; use one of {known}, or give --format", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        graphs = [options.against, options.graph] if options.against else [options.graph]
        sides = sides_or_status(graphs, options, Path(folder))
    if isinstance(sides, int):
        return sides
    before, after = sides[0][0], sides[-1][0]
    diagram = build_both(before, after, step_marks(before, after)) if options.against else build_diagram(after)
    drawing = FORMATS[options.format or _BY_SUFFIX.get(suffix, "mermaid")](diagram)
    if options.output is None:
        sys.stdout.write(drawing)
        return 0
    try:
        options.output.write_text(drawing, encoding="utf-8")
    except OSError as error:
        print(f"weft draw: cannot write '{options.output}': {error.strerror}", file=sys.stderr)
        return 1
    return 0
