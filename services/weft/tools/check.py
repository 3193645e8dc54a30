"""``weft check``: reports every error of graph and configuration files, without a server."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from weft.base.errors import NotFoundError, WeftError
from weft.base.repository.layout import (
    CONFIG_FILENAME,
    folders_of_models,
    is_model_folder,
    is_version,
    model_names,
    served_folders,
    twice_named,
)
from weft.base.text.pbtxt import Diagnostic, render
from weft.router.compile import check_graph
from weft.tools.lock import LockCatalog
from weft.tools.offline import (
    BACKENDS,
    GRAPH_FILENAME,
    GRAPH_FOLDER,
    Examination,
    OfflineCatalog,
    diagnostics_of,
    examine,
    examine_files,
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

    Models of a repository without a ``config.pbtxt`` are there by the name that it would have.

    Raises:
        OSError: A folder cannot be read.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        found = [*sorted(_below(path)), *_models_below(path)] if path.is_dir() else [path]
        for file in found:
            files.setdefault(_resolved(file), file)
    return list(files.values())


def _resolved(file: Path) -> Path:
    """The file's path for comparison, also of a link that leads back to itself."""
    try:
        return file.resolve()
    except (OSError, RuntimeError):
        return file.absolute()


def _below(path: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(path, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in FILENAMES if name in names)


def _model_folders(path: Path) -> dict[str, Path]:
    """The folders whose models services would load, if the path is that of a repository; the router's is left out."""
    folders = folders_of_models(path, tuple(BACKENDS))
    if folders or not any(map(is_model_folder, path.iterdir())):
        return folders
    return {"model": path}


def _models_below(path: Path) -> Iterator[Path]:
    for folder in _model_folders(path).values():
        configs = (folder / name / CONFIG_FILENAME for name in model_names(folder))
        yield from (config for config in configs if not config.is_file())


def check_layout(path: Path) -> list[Diagnostic]:
    """What is wrong with the folders of a repository: with a service's, of two models of one name, or of a graph.

    A folder without a service's folder is none.
    """
    folders, found = _model_folders(path), dict[Path, str]()
    if folders and folders.get("model") != path:
        try:
            served_folders(path, tuple(BACKENDS), GRAPH_FOLDER)
        except NotFoundError as error:
            found[path] = error.message
    found |= twice_named(folders.values())
    if (graphs := graphs_of(path)) is not None:
        graphs.scan()
        found |= {path / GRAPH_FOLDER / name: f"graph '{name}': {fault}" for name, fault in graphs.faults.items()}
    return [Diagnostic(str(place), 0, 0, text) for place, text in found.items()]


def check(files: Sequence[Path], repository: Path | None, lock: LockCatalog | None = None) -> list[Diagnostic]:
    """Errors and warnings of the files, file by file, in order of position; shared ones once.

    The files of models whose configurations are among the files are checked too, as far as that needs no loading.

    Args:
        repository: Source of models and nested graphs; None: for each graph the repository that it is in, else
            ./model_repository. Its configurations are checked too, because graphs depend on them.
        lock: Source of models instead. Nested graphs then come from the repository, else from the folders around a
            graph.
    """
    given = {_resolved(file) for file in files}

    @cache
    def examined(config: Path) -> Examination:
        return examine_files(config) if _resolved(config) in given else examine(config)

    by_file: dict[Path, list[Diagnostic]] = {}
    catalogs: dict[Path, OfflineCatalog] = {}
    for file in files:
        try:
            if file.name in FILENAMES:  # a file of another name was given by the caller, and may be a pipe
                require_regular(file)
            if fault := misplaced(file):
                by_file[_resolved(file)] = [Diagnostic(str(file), 0, 0, fault, severity="warning")]
                continue
            if not is_graph(file):
                if _resolved(file) not in by_file:
                    _, by_file[_resolved(file)] = examined(file)
                continue
            place = repository or repository_of(file)
            if lock is not None:
                nested = graphs_around(file) if repository is None else graphs_of(repository)
                found = check_graph(graph_source(file), lock, nested)
            elif place is not None:
                catalog = catalogs.get(place) or catalogs.setdefault(place, OfflineCatalog(place, examined))
                by_file = {**catalog.diagnostics, **by_file}
                found = check_graph(graph_source(file), catalog, graphs_of(place))
            else:
                found = check_graph(graph_source(file))
                if all(one.code != _SYNTAX for one in found):
                    found = [*found, Diagnostic(str(file), 0, 0, _UNKNOWN, severity="warning")]
            by_file[_resolved(file)] = found
        except (OSError, WeftError) as error:
            by_file[_resolved(file)] = diagnostics_of(error, file)
    return list(dict.fromkeys(found for diagnostics in by_file.values() for found in diagnostics))


def misplaced(file: Path) -> str:
    """Why no service reads the file where it is; "" if one may."""
    folder, *folders = _resolved(file).parents
    if file.name == CONFIG_FILENAME and is_version(folder.name):
        return f"it is in a version folder, where nobody reads it; move it beside the folder, to {folder.parent}"
    is_of_service = file.name == GRAPH_FILENAME and len(folders) > 2 and folders[1].name in BACKENDS
    graphs = folders[2] / GRAPH_FOLDER if is_of_service else None
    if graphs is None or not graphs.is_dir():
        return ""
    return f"a graph in the folder of a service is not served; move {folders[0]} to {graphs}"


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
