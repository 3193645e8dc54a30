"""Checks open files, and knows the models and graphs of the repositories around them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from google.protobuf import text_format

from weft.base.errors import WeftError
from weft.base.repository.layout import CONFIG_FILENAME
from weft.base.text.pbtxt import Diagnostic
from weft.language.compiler.name_table import NameTable
from weft.language.compiler.resolve import Resolver
from weft.language.syntax.file import GraphFile, GraphReport
from weft.router.compile import check_graph
from weft.router.operators import KINDS
from weft.router.policies import POLICIES
from weft.router.repository.files import GraphRepository
from weft.tools.check import misplaced
from weft.tools.offline import (
    Examination,
    OfflineCatalog,
    diagnostics_of,
    examine,
    examine_files,
    graph_source,
    graphs_of,
    is_graph,
    repository_of,
)
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig

#: Unsaved texts, by resolved path.
Texts = Mapping[Path, str]


class Surroundings(NamedTuple):
    """What a graph may name; without a repository nothing but its own nodes."""

    catalog: OfflineCatalog | None
    graphs: GraphRepository | None


class Names(NamedTuple):
    """A graph's names, resolved as far as its text is sound."""

    file: GraphFile
    table: NameTable


def message_of(path: Path, text: str) -> pb.Graph | ModelConfig:
    """An empty message of the type that a file has."""
    return pb.Graph() if is_graph(path, text) else ModelConfig()


class Workspace:
    """Examines each model again when its files, or the open text of its configuration, have changed; for any thread."""

    def __init__(self) -> None:
        self._examined: dict[Path, tuple[object, Examination]] = {}

    def check(self, path: Path, texts: Texts) -> list[Diagnostic]:
        """Errors and warnings of an open file, as of ``weft check``; those of a graph that it names are among them."""
        text = texts[path]
        try:
            if fault := misplaced(path):
                return [Diagnostic(str(path), 0, 0, fault, severity="warning")]
            if not is_graph(path, text):
                return self._examine(texts, path, is_fresh=True)[1]
            return check_graph(graph_source(path, text), *self.around(path, texts, is_fresh=True))
        except (OSError, WeftError) as error:
            return diagnostics_of(error, path)

    def around(self, path: Path, texts: Texts, *, is_fresh: bool = False) -> Surroundings:
        """What is around a graph; unless ``is_fresh``, models as last examined. Raises OSError."""
        place = repository_of(path)
        if place is None or not place.is_dir():
            return Surroundings(None, None)
        return Surroundings(OfflineCatalog(place, partial(self._examine, texts, is_fresh=is_fresh)), graphs_of(place))

    def names(self, path: Path, message: pb.Graph, texts: Texts) -> Names | None:
        """The names of a graph that has these fields; None if it has none."""
        report = GraphReport(str(path))
        resolver = Resolver(KINDS, POLICIES, *self.around(path, texts), report)
        text = text_format.MessageToString(message, as_utf8=True)
        file = resolver.load(graph_source(path, text))
        return None if file is None else Names(file, NameTable(resolver, KINDS, report))

    def _examine(self, texts: Texts, config: Path, *, is_fresh: bool) -> Examination:
        text = texts.get(config.resolve())
        known = self._examined.get(config)
        if known is not None and not is_fresh:
            return known[1]
        folder = config.parent
        files = [folder / CONFIG_FILENAME, folder, *folder.glob("*"), *folder.glob("*/*")]
        stamp = (text, [(file, file.stat().st_mtime_ns) for file in files if file.exists()])
        if known is None or known[0] != stamp:
            examination = examine(config) if text is None else examine_files(config, text)
            known = self._examined[config] = (stamp, examination)
        return known[1]
