"""``weft check``: reports every error of graph and configuration files, without a server."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from weft.base.errors import WeftError
from weft.base.text.pbtxt import Diagnostic, render
from weft.router.compile import check_graph
from weft.router.repository.files import GraphRepository
from weft.serving.config import CONFIG_FILENAME
from weft.tools.lock import LockCatalog
from weft.tools.offline import (
    GRAPH_FILENAME,
    OfflineCatalog,
    define_offline,
    diagnostics_of,
    graph_source,
    graphs_around,
    graphs_of,
    is_graph,
    repository_of,
    require_regular,
)

_SYNTAX = "G001"
#: What a folder is searched for.
FILENAMES = (GRAPH_FILENAME, CONFIG_FILENAME)
#: Severities as workflow commands name them.
_LEVELS = {"error": "error", "warning": "warning", "info": "notice"}
_JSON_KEYS = ("file", "line", "column", "message", "code", "severity")
_UNKNOWN = "its models are not known, so names and types were not checked; give --repository DIR or --lock FILE"


def find_files(paths: Iterable[Path]) -> list[Path]:
    """The given files and those below the given folders, each once; hidden folders are skipped.

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
        yield from (Path(folder, name) for name in FILENAMES if name in names)


def check(files: Sequence[Path], repository: Path | None, lock: LockCatalog | None = None) -> list[Diagnostic]:
    """Errors and warnings of the files, file by file, in order of position; shared ones once.

    Args:
        repository: Source of models and nested graphs; None: for each graph the repository that it is in, else
            ./model_repository. Its configurations are checked too, because graphs depend on them.
        lock: Source of models instead. Nested graphs then come from the repository, else from the folders around a
            graph.
    """
    by_file: dict[Path, list[Diagnostic]] = {}
    catalogs: dict[Path, OfflineCatalog] = {}
    for file in files:
        try:
            if file.name in FILENAMES:  # a file of another name was given by the caller, and may be a pipe
                require_regular(file)
            if not is_graph(file):
                if file.resolve() not in by_file:
                    by_file[file.resolve()] = []
                    define_offline(file)
                continue
            place = repository or repository_of(file)
            if lock is not None:
                nested = graphs_around(file) if repository is None else graphs_of(repository)
                found = check_graph(graph_source(file), lock, nested)
            elif place is not None:
                catalog = catalogs.get(place) or catalogs.setdefault(place, OfflineCatalog(place))
                by_file = {**catalog.diagnostics, **by_file}
                found = _check_graph(file, catalog, graphs_of(place))
            else:
                found = check_graph(graph_source(file))
                if all(one.code != _SYNTAX for one in found):
                    found = [*found, Diagnostic(str(file), 0, 0, _UNKNOWN, severity="warning")]
            by_file[file.resolve()] = found
        except (OSError, WeftError) as error:
            by_file[file.resolve()] = diagnostics_of(error, file)
    return list(dict.fromkeys(found for diagnostics in by_file.values() for found in diagnostics))


def _check_graph(file: Path, catalog: OfflineCatalog, graphs: GraphRepository | None) -> list[Diagnostic]:
    source = graph_source(file)
    catalog.undeclared.clear()
    found = check_graph(source, catalog, graphs)
    if not catalog.undeclared:
        return found
    names = ", ".join(sorted(catalog.undeclared))
    unknown = f"inputs or outputs of {names} are not in the configuration, so names and types were not checked"
    return [*check_graph(source, None, graphs), Diagnostic(str(file), 0, 0, unknown, severity="warning")]


def _as_json(found: Sequence[Diagnostic]) -> str:
    """A list of objects with exactly the keys of ``_JSON_KEYS``.

    ``line`` and ``column`` count from 1, 0 where they are not known; ``code`` is "" outside graphs; ``severity`` is
    "error", "warning" or "info".
    """
    return json.dumps([{key: getattr(one, key) for key in _JSON_KEYS} for one in found], indent=2)


def _as_github(found: Sequence[Diagnostic]) -> str:
    """Workflow commands, which GitHub shows beside the line; paths begin at the working directory.

    Source:
        https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
    """
    return "\n".join(
        f"::{_LEVELS[d.severity]} file={_escaped(_from_here(d.file), ':,')},"
        f"{f'line={d.line},col={d.column},' * (d.line > 0)}title={d.code or 'weft'}::{_escaped(d.message)}"
        for d in found
    )


def _from_here(file: str) -> str:
    """The path relative to the working directory, if the file is below it."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def _escaped(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


#: The formats of reports.
FORMATS: dict[str, Callable[[Sequence[Diagnostic]], str]] = {"text": render, "json": _as_json, "github": _as_github}
