"""The graph files of a repository."""

import re
from dataclasses import dataclass
from pathlib import Path

from weft_common import pbtxt
from weft_common.logs import get_logger
from weft_protos import graph_pb2
from weft_router.graph.source import GraphSource

#: As Triton Inference Server has it: a whole number of at least 1 without leading zeros.
_VERSION_FOLDER = re.compile(r"[1-9][0-9]{0,17}")

_log = get_logger("weft.router.graphs")


@dataclass(frozen=True, slots=True)
class GraphFile:
    """One version of a graph.

    Attributes:
        name: The folder's name.
        version: Numeric, as a string.
        path: ``<name>/<version>/graph.pbtxt``, or ``<name>/config.pbtxt`` of a Triton ensemble.
    """

    name: str
    version: str
    path: Path

    def read(self) -> GraphSource:
        """The file's content for the compiler. Raises OSError."""
        return GraphSource(self.path.read_bytes(), str(self.path), self.name, self.version)


class GraphRepository:
    """Finds graph files under a folder; names that clients send are compared with what is there, never made a path.

    Args:
        root: The repository.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._warned: set[Path] = set()

    def scan(self) -> dict[str, list[GraphFile]]:
        """Every graph with its versions to serve, lowest first. A folder without a graph file is left out.

        All versions that have a ``graph.pbtxt`` are served; of a Triton ensemble those that ``version_policy`` says.
        What looks like a graph and cannot be one is logged, once, and left out.

        Raises:
            OSError: The repository cannot be read.
        """
        graphs: dict[str, list[GraphFile]] = {}
        for folder in sorted(self._root.iterdir()):
            if folder.name.startswith(".") or not folder.is_dir():
                continue
            try:
                folder.name.encode()
                files = _files(folder)
            except UnicodeEncodeError:
                self._warn(folder, "its name is not UTF-8")
            except OSError as error:
                self._warn(folder, f"it cannot be read: {error.strerror}")
            else:
                if files:
                    graphs[folder.name] = files
                elif (folder / "config.pbtxt").is_file():
                    self._warn(folder, "it has no version folder; make an empty folder '1' beside config.pbtxt")
        return graphs

    def _warn(self, folder: Path, reason: str) -> None:
        if folder not in self._warned:
            self._warned.add(folder)
            _log.warning("folder %s is left out: %s", ascii(str(folder)), reason)

    def find(self, name: str, version: str) -> GraphSource | None:
        """A graph for the compiler, which inlines it where another graph names it; version "" means the latest."""
        files = self.scan().get(name, [])
        chosen = [file for file in files if not version or file.version == version]
        return chosen[-1].read() if chosen else None

    def names(self) -> list[str]:
        """Every graph name."""
        return list(self.scan())


def _files(folder: Path) -> list[GraphFile]:
    versions = sorted(
        (entry.name for entry in folder.iterdir() if _VERSION_FOLDER.fullmatch(entry.name) and entry.is_dir()), key=int
    )
    files = [GraphFile(folder.name, version, folder / version / "graph.pbtxt") for version in versions]
    files = [file for file in files if file.path.is_file()]
    config = folder / "config.pbtxt"
    if files or not versions or not config.is_file():
        return files
    return [GraphFile(folder.name, version, config) for version in _served_versions(config, versions)]


def _served_versions(config: Path, versions: list[str]) -> list[str]:
    """Versions of a Triton ensemble to serve: the highest, where the file says nothing else or cannot be read."""
    try:
        graph, _ = pbtxt.parse(config.read_bytes(), graph_pb2.Graph(), file=str(config))
    except (pbtxt.PbtxtError, OSError):
        return versions[-1:]  # the compiler reports it
    policy = graph.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return versions
        case "specific":
            wanted = {str(version) for version in policy.specific.versions}
            return [version for version in versions if version in wanted]
        case "latest":
            return versions[-max(policy.latest.num_versions, 1) :]
        case _:
            return versions[-1:]
