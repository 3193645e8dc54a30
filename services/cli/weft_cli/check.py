"""``weft check``: every error of graph and configuration files, without a server."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from weft_cli.offline import (
    GRAPH_FILENAME,
    GRAPH_FOLDER,
    OfflineCatalog,
    define_offline,
    diagnostics_of,
    graph_source,
    is_graph,
)
from weft_common.errors import WeftError
from weft_common.pbtxt import Diagnostic, render
from weft_router.graph import check_graph
from weft_router.graphs import GraphRepository
from weft_serving.config import CONFIG_FILENAME


def run(options: argparse.Namespace) -> int:
    """Print what was found; 0 without an error, 1 with one, 2 when there is nothing to check."""
    missing = [str(path) for path in [*options.paths, *filter(None, [options.repository])] if not path.exists()]
    if missing:
        print(f"weft check: no such file or folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    try:
        files = find_files(options.paths)
    except OSError as error:
        print(f"weft check: cannot read '{error.filename}': {error.strerror}", file=sys.stderr)
        return 2
    if not files:
        print(
            f"weft check: no {GRAPH_FILENAME} or {CONFIG_FILENAME} in {', '.join(map(str, options.paths))}",
            file=sys.stderr,
        )
        return 2
    found = check(files, options.repository)
    text = FORMATS[options.format](found)
    if text:
        print(text)
    num_errors = sum(diagnostic.severity == "error" for diagnostic in found)
    counts = {"file": len(files), "error": num_errors, "warning": len(found) - num_errors}
    print(", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items()), file=sys.stderr)
    return 1 if num_errors else 0


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The files given, and those below the folders given, each once; hidden folders are left out.

    Raises:
        OSError: A folder cannot be read.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        for file in sorted(_below(path)) if path.is_dir() else [path]:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _below(path: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(path, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in (GRAPH_FILENAME, CONFIG_FILENAME) if name in names)


def check(files: Sequence[Path], repository: Path | None) -> list[Diagnostic]:
    """Errors and warnings of the files, file by file, each in order of position.

    Args:
        files: Graphs and model configurations.
        repository: Where names and types of models come from; None leaves them unchecked. Its own configurations are
            checked too, because a graph depends on them.
    """
    catalog = OfflineCatalog(repository) if repository is not None else None
    has_graphs = repository is not None and (repository / GRAPH_FOLDER).is_dir()
    graphs = GraphRepository(repository / GRAPH_FOLDER) if repository is not None and has_graphs else None
    by_file = dict(catalog.diagnostics) if catalog is not None else {}
    for file in files:
        try:
            if is_graph(file):
                by_file[file.resolve()] = _check_graph(file, catalog, graphs)
            elif file.resolve() not in by_file:
                by_file[file.resolve()] = _check_model(file)
        except OSError as error:
            by_file[file.resolve()] = diagnostics_of(error, file)
    return [diagnostic for diagnostics in by_file.values() for diagnostic in diagnostics]


def _check_graph(file: Path, catalog: OfflineCatalog | None, graphs: GraphRepository | None) -> list[Diagnostic]:
    source = graph_source(file)
    if catalog is None:
        return check_graph(source, None, graphs)
    catalog.undeclared.clear()
    found = check_graph(source, catalog, graphs)
    if not catalog.undeclared:
        return found
    names = ", ".join(sorted(catalog.undeclared))
    unknown = f"inputs or outputs of {names} are not in the configuration, so names and types were not checked"
    return [*check_graph(source, None, graphs), Diagnostic(str(file), 0, 0, unknown, severity="warning")]


def _check_model(file: Path) -> list[Diagnostic]:
    try:
        define_offline(file)
    except WeftError as error:
        return diagnostics_of(error, file)
    return []


def _as_json(found: Sequence[Diagnostic]) -> str:
    return json.dumps(
        [{key: value for key, value in asdict(d).items() if key != "source_line"} for d in found], indent=2
    )


def _as_github(found: Sequence[Diagnostic]) -> str:
    """Workflow commands, which GitHub shows beside the line.

    Source:
        https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
    """
    return "\n".join(
        f"::{d.severity} file={_escaped(d.file, ':,')},{f'line={d.line},col={d.column},' * (d.line > 0)}"
        f"title={d.code or 'weft'}::{_escaped(d.message)}"
        for d in found
    )


def _escaped(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


FORMATS: dict[str, Callable[[Sequence[Diagnostic]], str]] = {"text": render, "json": _as_json, "github": _as_github}
