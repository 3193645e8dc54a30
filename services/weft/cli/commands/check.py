"""``weft check``: every error of graph and configuration files, without a server."""

import argparse
import sys
from functools import partial
from pathlib import Path

from weft.authoring.stale import stale
from weft.base.text.argument_types import add
from weft.base.text.pbtxt import PbtxtError
from weft.language.description import counted
from weft.tools.check import FILENAMES, FORMATS, check, check_layout, find_files
from weft.tools.lock import LockCatalog
from weft.tools.offline import diagnostics_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft check``."""
    option = partial(add, parser)
    parser.description = (
        "Report every error of graph and configuration files, without a server; also of the Python that writes a graph "
        "(graph.py beside its file, else graphs.py at the top of the repository), if it would write another text."
    )
    parser.epilog = "example: weft check mine --repository mine"
    option("paths PATH", "a file, or a folder to search", Path, nargs="+")
    option(
        "--repository DIR",
        "models and other graphs; default: the repository that a graph is in, else ./model_repository",
        Path,
    )
    option("--lock FILE", "check graphs against the signatures in this file of weft lock", Path)
    form = parser.add_mutually_exclusive_group()
    for name, text in (("json", "print facts as JSON"), ("github", "print annotations of GitHub's CI")):
        form.add_argument(f"--{name}", action="store_const", const=name, dest="format", default="text", help=text)


def run(options: argparse.Namespace) -> int:
    """Print what was found; 0 without an error, 1 with one, 2 when there is nothing to check."""
    given = [*options.paths, *filter(None, [options.repository, options.lock])]
    missing = [str(path) for path in given if not path.exists()]
    if missing:
        print(f"weft check: no such file or folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    try:
        files = find_files(options.paths)
    except BrokenPipeError:  # nobody reads the output, which is no file
        raise
    except OSError as error:
        print(f"weft check: cannot read '{error.filename}': {error.strerror}", file=sys.stderr)
        return 2
    if not files:
        where = ", ".join(map(str, options.paths))
        print(f"weft check: no {' or '.join(FILENAMES)} in {where}", file=sys.stderr)
        return 2
    try:
        lock = None if options.lock is None else LockCatalog(options.lock)
    except (PbtxtError, OSError) as error:
        print(FORMATS[options.format](diagnostics_of(error, options.lock)))
        return 1
    layout = [fault for path in options.paths if path.is_dir() for fault in check_layout(path)]
    found = layout + check(files, options.repository, lock) + stale(files)
    text = FORMATS[options.format](found)
    if text:
        print(text)
    num_errors = sum(diagnostic.severity == "error" for diagnostic in found)
    num_warnings = sum(diagnostic.severity == "warning" for diagnostic in found)
    counts = {"file": len(files), "error": num_errors, "warning": num_warnings}
    print(", ".join(counted(count, noun) for noun, count in counts.items()), file=sys.stderr)
    return 1 if num_errors else 0
