"""``weft convert``: read a file, find its graphs, write each."""

import argparse
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from weft_common.errors import WeftError
from weft_common.text.pbtxt import render
from weft_tools.convert import kserve, seldon
from weft_tools.convert.graphs import convert, kinds_of, read_source, signatures_for
from weft_tools.convert.yaml_tree import MAX_FILE_BYTES, UnreadableError
from weft_tools.offline import GRAPH_FILENAME


def run(options: argparse.Namespace) -> int:
    """Write the graphs; 0 done, though questions may be left in the output, 1 the file has errors, 2 wrong usage."""
    if find_spec("yaml") is None:
        return _fail("PyYAML is not installed; install it with: pip install 'weft[convert]'")
    is_input = str(options.file) == "-"
    name, stem = ("standard input", "graph") if is_input else (str(options.file), options.file.stem)
    try:
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if is_input else _head(options.file)
        catalog = signatures_for(options.repository, options.lock)
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
    graphs = convert(source, documents, catalog, stem)
    if source.diagnostics:
        print(render(sorted(source.diagnostics, key=lambda d: (d.line, d.column))), file=sys.stderr)
    if source.has_errors:
        return 1
    if not graphs:
        kinds = ", ".join(kinds_of(documents)) or "nothing"
        return _fail(f"{name} has no {kserve.KIND} of KServe and no {seldon.KIND} of Seldon Core; it has {kinds}")
    return _write(graphs, options.output)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def _write(graphs: Mapping[str, str], output: Path | None) -> int:
    is_folder = output is not None and output.suffix != ".pbtxt"
    if len(graphs) > 1 and not is_folder:
        names = ", ".join(graphs)
        return _fail(f"the file has {len(graphs)} graphs: {names}; give a folder with -o, which gets FOLDER/NAME/1/")
    try:
        for name, text in graphs.items():
            if output is None:
                sys.stdout.write(text)
                continue
            path = output / name / "1" / GRAPH_FILENAME if is_folder else output
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            num_checks = text.count("# CHECK: ")
            left = f"; {num_checks} line{'s say' if num_checks > 1 else ' says'} CHECK" if num_checks else ""
            print(f"wrote {path}{left}; next: weft check {path}", file=sys.stderr)
    except OSError as error:
        return _fail(f"cannot write '{error.filename}': {error.strerror}")
    return 0


def _fail(message: str) -> int:
    print(f"weft convert: {message}", file=sys.stderr)
    return 2
