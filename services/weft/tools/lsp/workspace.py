"""Checks open files, and knows the models and graphs of the repositories around them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from google.protobuf import text_format

from weft.base.errors import WeftError
from weft.base.repository.layout import CONFIG_FILENAME, declares_graph
from weft.base.text.pbtxt import Diagnostic
from weft.language.compiler.name_table import NameTable
from weft.language.compiler.resolve import Resolver
from weft.language.syntax.file import GraphFile, GraphReport
from weft.router.compile import check_graph
from weft.router.operators import KINDS
from weft.router.policies import POLICIES
from weft.router.repository.files import GraphRepository
from weft.tools import offline
from weft.tools.check import misplaced
from weft_protos.graph_pb2 import Graph
from weft_protos.model_config_pb2 import ModelConfig

#: Unsaved texts, by resolved path.
Texts = Mapping[Path, str]


def message_of(path: Path, text: str) -> Graph | ModelConfig:
    """An empty message of the type that a file has."""
    return Graph() if path.name != CONFIG_FILENAME or declares_graph(text) else ModelConfig()


class Workspace:
    """Examines a model again when its files, or the open text of its configuration, have changed; for any thread."""

    def __init__(self) -> None:
        self._examined: dict[Path, tuple[object, offline.Examination]] = {}

    def check(self, path: Path, texts: Texts) -> list[Diagnostic]:
        """Errors and warnings of an open file, as of ``weft check``; those of graphs that it names are among them."""
        text = texts[path]
        try:
            if fault := misplaced(path):
                return [Diagnostic(str(path), 0, 0, fault, severity="warning")]
            if isinstance(message_of(path, text), ModelConfig):
                return self._examine(texts, path, is_fresh=True)[1]
            return check_graph(offline.graph_source(path, text), *self.around(path, texts, is_fresh=True))
        except (OSError, WeftError) as error:
            return offline.diagnostics_of(error, path)
        except RuntimeError as error:  # a link to itself
            return [Diagnostic(str(path), 0, 0, str(error))]

    def around(
        self, path: Path, texts: Texts, *, is_fresh: bool = False
    ) -> tuple[offline.OfflineCatalog | None, GraphRepository | None]:
        """Models, unless ``is_fresh`` as last examined, and graphs of a file's repository, if it has one."""
        place = offline.repository_of(path)
        if place is None or not place.is_dir():
            return None, None
        examine = partial(self._examine, texts, is_fresh=is_fresh)
        return offline.OfflineCatalog(place, examine), offline.graphs_of(place)

    def names(self, path: Path, message: Graph, texts: Texts) -> tuple[GraphFile, NameTable] | None:
        """A graph with these fields and its names; None if it has no fields."""
        report = GraphReport(str(path))
        resolver = Resolver(KINDS, POLICIES, *self.around(path, texts), report)
        text = text_format.MessageToString(message, as_utf8=True)
        file = resolver.load(offline.graph_source(path, text))
        return None if file is None else (file, NameTable(resolver, KINDS, report))

    def _examine(self, texts: Texts, config: Path, *, is_fresh: bool) -> offline.Examination:
        known = self._examined.get(config)
        if known is not None and not is_fresh:
            return known[1]
        text, folder = texts.get(config.resolve()), config.parent
        files = [file for file in (folder, *folder.glob("*"), *folder.glob("*/*")) if file.exists()]
        stamp = (text, [(file, file.stat().st_mtime_ns) for file in files])
        if known is None or known[0] != stamp:
            found = offline.examine(config) if text is None else offline.examine_files(config, text)
            known = self._examined[config] = (stamp, found)
        return known[1]
