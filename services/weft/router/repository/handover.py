"""Hands the graphs in service over to a worker that starts, so that it serves what its siblings serve."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.base.errors import WeftError
from weft.base.observing.logs import get_logger
from weft.language.syntax.file import GraphSource
from weft.router.repository.files import VersionFile
from weft.router.repository.lifecycle import GraphLifecycle
from weft.router.repository.serving import ServingGraph
from weft.router.repository.table import Graph, GraphTable, GraphVersion

_log = get_logger("weft.router.graphs")


def state_of(table: GraphTable, lifecycle: GraphLifecycle) -> dict[str, Any]:
    """State to hand over, as JSON values: what is served, wanted, unloaded and available for rollback."""
    return {
        "files": {name: [_file(file) for file in files] for name, files in lifecycle.files.items()},
        "graphs": {name: _graph(graph) for name, graph in table.graphs.items()},
    }


async def take_over(state: Mapping[str, Any], table: GraphTable, lifecycle: GraphLifecycle) -> None:
    """Load a sibling's graphs instead of the repository's; failed ones are tried again later.

    Raises UnavailableError if the repository cannot be read.
    """
    async with lifecycle.lock:
        await lifecycle.scan()  # for faults of folders
        lifecycle.files.update({name: [_file_from(*file) for file in files] for name, files in state["files"].items()})
        serving: list[GraphVersion] = []
        pending: dict[GraphVersion, GraphSource] = {}
        for name, given in state["graphs"].items():
            graph = table.graphs[name] = Graph()
            for version in given["versions"]:
                entry = graph.entry(_file_from(*version["file"]))
                if version["is_wanted"]:
                    entry.candidate = _source_from(entry, version["serving"])
                    serving.append(entry)
                if version["candidate"] is not None and (source := _source_from(entry, version["candidate"])):
                    pending[entry] = source
                entry.is_wanted, entry.is_gone = version["is_wanted"], version["is_gone"]
                entry.reason = version["reason"]
        await lifecycle.settle(serving)
        for entry, source in pending.items():
            entry.candidate = source
        await lifecycle.settle(pending)
        for name, given in state["graphs"].items():
            table.graphs[name].previous = await _previous(name, given["previous"], lifecycle)
        table.choose_defaults()


async def _previous(
    name: str, given: Mapping[str, Any] | None, lifecycle: GraphLifecycle
) -> dict[str, ServingGraph] | None:
    """The definition that a rollback restores; None if it no longer compiles."""
    if given is None:
        return None
    try:
        return {
            version: await lifecycle.made(GraphSource(b64decode(text), file, name, version))
            for version, (text, file) in given.items()
        }
    except WeftError as error:
        _log.warning("graph '%s' cannot be rolled back here: %s", name, error.message)
        return None


def _graph(graph: Graph) -> dict[str, Any]:
    previous = graph.previous
    return {
        "versions": [
            {
                "file": _file(entry.file),
                "is_wanted": entry.is_wanted,
                "is_gone": entry.is_gone,
                "reason": entry.reason,
                "serving": None if entry.serving is None else _source(entry.serving.source),
                "candidate": None if entry.candidate is None else _source(entry.candidate),
            }
            for entry in graph.versions.values()
        ],
        "previous": previous and {version: _source(serving.source) for version, serving in previous.items()},
    }


def _file(file: VersionFile) -> tuple[str, str, str, tuple[int, int, int]]:
    return file.name, file.version, str(file.path), file.stamp


def _file_from(name: str, version: str, path: str, stamp: tuple[int, int, int]) -> VersionFile:
    ctime_ns, size_bytes, inode = stamp
    return VersionFile(name, version, Path(path), (ctime_ns, size_bytes, inode))


def _source(source: GraphSource) -> tuple[str, str]:
    text = source.text.encode() if isinstance(source.text, str) else source.text
    return b64encode(text).decode(), source.file


def _source_from(entry: GraphVersion, given: tuple[str, str] | None) -> GraphSource | None:
    return None if given is None else GraphSource(b64decode(given[0]), given[1], entry.file.name, entry.file.version)
