"""``weft convert``: read a file, find its graphs, write each."""

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from weft.authoring.stale import BESIDE
from weft.authoring.to_python import python_text
from weft.base.errors import WeftError
from weft.base.text.argument_types import add
from weft.base.text.pbtxt import PbtxtError, render
from weft.language import GraphError
from weft.tools.convert.draft import CHECK, DIFFERS
from weft.tools.convert.graphs import KINDS, convert, kinds_of, read_source
from weft.tools.convert.signatures import signatures_for
from weft.tools.convert.yaml_tree import MAX_FILE_BYTES, UnreadableError
from weft.tools.lock import LockCatalog
from weft.tools.offline import GRAPH_FILENAME, OfflineCatalog, graph_source, graphs_of, is_graph, repository_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft convert``."""
    option = partial(add, parser)
    parser.description = (
        "Write graph.pbtxt for each InferenceGraph of KServe, SeldonDeployment of Seldon Core 1, and "
        "Pipeline and Experiment of Seldon Core 2 in the file. What a person has to look at is a comment there that "
        "begins with CHECK, and a warning. Ends with status 1 if the file has errors, or if something that changes "
        'answers was left out: "CHECK: answers may differ".'
    )
    parser.description += " With --to python write a graph, or an ensemble's config.pbtxt, as Python."
    parser.epilog = (
        "example: weft convert inference-graph.yaml --repository model_repository -o model_repository/graphs"
    )
    option("file FILE", "YAML or JSON; - is standard input; with --to python a graph's file", Path)
    option(
        "-o --output PATH",
        "a .pbtxt file, or a folder for FOLDER/NAME/1/graph.pbtxt; of python a .py file; default: standard output",
        Path,
    )
    option("--to FORM", "what to write", choices=("pbtxt", "python"), default="pbtxt")
    option("--force", "write over graphs that exist")
    types = partial(add, parser.add_mutually_exclusive_group())
    types("--lock FILE", "take the signatures of models from this file of weft lock", Path)
    types("--repository DIR", "take those of models and graphs from this repository", Path)


def run(options: argparse.Namespace) -> int:
    """Write the graphs.

    Returns:
        0: written; a line with CHECK asks for missing information. 1: the file has errors and nothing is written, or
        something that changes answers was left out, and a line says "CHECK: answers may differ". 2: nothing is written,
        because the call is wrong: the source does not exist or has nothing to convert, or the output exists.
    """
    if options.to == "python":
        return _to_python(options)
    is_input = str(options.file) == "-"
    name, stem = ("standard input", "graph") if is_input else (str(options.file), options.file.stem)
    try:
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if is_input else _head(options.file)
        signatures = signatures_for(options.repository, options.lock)
        source = read_source(data, name)
    except OSError as error:
        return _fail(f"cannot read '{error.filename}': {error.strerror}")
    except WeftError as error:
        return _fail(error.message)
    try:
        documents = source.documents()
    except UnreadableError as error:
        print(render([error.diagnostic]), file=sys.stderr)
        return 1
    graphs = convert(source, documents, signatures, stem)
    if source.diagnostics:
        found = sorted(dict.fromkeys(source.diagnostics), key=lambda d: (d.file, d.line, d.column))
        print(render(found), file=sys.stderr)
    if source.has_errors:
        return 1
    if not graphs:
        kinds = ", ".join(kinds_of(documents)) or "nothing"
        return _fail(f"{name} has no {KINDS}; it has {kinds}")
    return _write(graphs, options.output, None if is_input else options.file, force=options.force)


def _to_python(options: argparse.Namespace) -> int:
    file, output, lock, place = options.file, options.output, options.lock, '"model_repository"'
    try:
        source, repository = graph_source(file), options.repository or repository_of(file)
        if not is_graph(file):
            return _fail(f"'{file}' is the configuration of a model, not of an ensemble")
        if repository is not None and not repository.is_dir():
            return _fail(f"no such folder: {repository}")
        if repository is None and lock is None:
            return _fail(f"the models that '{file}' calls are not known; give --repository DIR or --lock FILE")
        if repository is not None:
            place = json.dumps(str(repository))
            if output is not None and output.resolve().is_relative_to(repository.resolve()):
                depth = len(output.resolve().relative_to(repository.resolve()).parts)
                place = f"Path(__file__).parents[{depth - 1}]"
        catalog = OfflineCatalog(repository) if repository is not None and lock is None else LockCatalog(lock)
        graphs = graphs_of(repository) if repository is not None else None
        text = python_text(source, catalog, graphs, repository=place, lock=lock)
    except (PbtxtError, GraphError) as error:
        print(render(error.diagnostics), file=sys.stderr)
        return 1
    except OSError as error:
        return _fail(f"cannot read '{error.filename}': {error.strerror}")
    return _write({source.name: text}, output, file, force=options.force, filename=BESIDE)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def _write(
    graphs: Mapping[str, str],
    output: Path | None,
    converted: Path | None,
    *,
    force: bool,
    filename: str = GRAPH_FILENAME,
) -> int:
    is_folder = output is not None and output.suffix != Path(filename).suffix
    if len(graphs) > 1 and not is_folder:
        names = ", ".join(graphs)
        return _fail(f"the file has {len(graphs)} graphs: {names}; give a folder with -o, which gets FOLDER/NAME/1/")
    if output is None:
        sys.stdout.write("".join(graphs.values()))
        return _status(graphs)
    paths = {name: output / name / "1" / filename if is_folder else output for name in graphs}
    if converted is not None and converted.resolve() in [path.resolve() for path in paths.values()]:
        return _fail(f"{converted} is the file that is converted; give another with -o")
    existing = [str(path) for path in paths.values() if path.exists()]
    if existing and not force:
        return _fail(f"{', '.join(existing)} exists; nothing was written. --force writes over it")
    try:
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w" if force else "x", encoding="utf-8") as file:
                file.write(graphs[name])
            then = "weft check" if filename == GRAPH_FILENAME else "python"
            print(f"wrote {path}{_left(graphs[name])}; next: {then} {path}", file=sys.stderr)
    except OSError as error:
        return _fail(f"cannot write '{error.filename}': {error.strerror}")
    return _status(graphs)


def _left(text: str) -> str:
    """Summary of what a person must check."""
    num_checks, num_differences = text.count(f"# {CHECK}"), text.count(f"# {CHECK}{DIFFERS}")
    if not num_checks:
        return ""
    which = f", {num_differences} of them that answers may differ" if num_differences else ""
    return f"; {num_checks} line{'s say' if num_checks > 1 else ' says'} CHECK{which}"


def _status(graphs: Mapping[str, str]) -> int:
    return int(any(f"# {CHECK}{DIFFERS}" in text for text in graphs.values()))


def _fail(message: str) -> int:
    print(f"weft convert: {message}", file=sys.stderr)
    return 2
