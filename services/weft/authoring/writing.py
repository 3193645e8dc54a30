"""Graphs and models of Python as files, files as graphs, and whether the two still say the same."""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft.authoring.faults import fault
from weft.authoring.graph import Graph
from weft.authoring.models import models
from weft.authoring.steps import with_called
from weft.base.errors import InvalidArgumentError
from weft.base.repository.layout import is_folder_name, is_model_folder
from weft.base.text.pbtxt import Diagnostic, parse
from weft.language.dialects import TRITON, dialect_of
from weft.language.syntax.file import GraphError, GraphSource
from weft.serving.config import CONFIG_FILENAME
from weft.tools.offline import BACKENDS, GRAPH_FILENAME, GRAPH_FOLDER, graph_source, is_graph, repository_of
from weft_protos import graph_pb2 as pb


def write(*things: Any, to: str | Path) -> list[Path]:
    """Write graphs and models, and those in Python that they call, into a repository; or none if one has an error.

    A graph becomes ``graphs/NAME/VERSION/graph.pbtxt``, an ensemble ``graphs/NAME/config.pbtxt``, a model the folder
    ``model/NAME``, or ``NAME`` in a repository whose models have no folder by service. Each file appears at once and
    whole; one that would not change is not touched.

    Args:
        things: What ``@weft.graph`` and ``@weft.model`` make, or ``weft.read``.
        to: The repository; made if it is not there.

    Returns:
        The files that changed.

    Raises:
        GraphError: A graph has errors (with its diagnostics), or a thing is neither a graph nor a model.
        OSError: A file cannot be written.
    """
    repository = Path(to)
    every = with_called(things)
    found: list[Diagnostic] = []
    for thing in every:
        if isinstance(thing, Graph):
            known = models(repository) if thing.catalog is None and repository.is_dir() else None
            found += [one for one in thing.check(known) if one.severity == "error"]
            if not is_folder_name(thing.name):
                raise fault("", f"graph {thing.name!r} needs a name that a folder can have, without '/'")
        elif isinstance(thing, type) or not callable(getattr(thing, "write", None)):
            raise fault(
                "G025", f"weft.write takes graphs and models, which @weft.graph and @weft.model make, got {thing!r}"
            )
    if found:
        raise GraphError(found)
    around = next(folder for folder in (repository.absolute(), *repository.absolute().parents) if folder.is_dir())
    with TemporaryDirectory(prefix=".weft-", dir=around) as folder:
        staged = Path(folder)
        place = staged if _is_of_models(repository) else staged / "model"
        made = [file for thing in every if not isinstance(thing, Graph) for file in thing.write(place)]
        made += [_write_graph(thing, staged) for thing in every if isinstance(thing, Graph)]
        if twice := [file for file in made if made.count(file) > 1]:
            what = twice[0].relative_to(staged)
            raise fault("", f"weft.write got two things that are both {what}; give one of them another name")
        return [*_replaced(staged, made, repository)]


def _is_of_models(repository: Path) -> bool:
    """Whether models lie directly in the folder: it is that of a service, or has one already."""
    return repository.name in BACKENDS or (repository.is_dir() and any(map(is_model_folder, repository.iterdir())))


def _write_graph(graph: Graph, repository: Path) -> Path:
    folder = repository / GRAPH_FOLDER / graph.name
    version = folder / str(graph.version)
    version.mkdir(parents=True, exist_ok=True)
    file = folder / CONFIG_FILENAME if dialect_of(graph.message) is TRITON else version / GRAPH_FILENAME
    file.write_text(graph.text, encoding="utf-8")
    return file


def _replaced(staged: Path, files: Iterable[Path], repository: Path) -> Iterator[Path]:
    """Move the files into the repository, but for those that it has already, and return these."""
    for folder in [path for path in sorted(staged.rglob("*")) if path.is_dir()]:
        (repository / folder.relative_to(staged)).mkdir(parents=True, exist_ok=True)
    for file in files:
        target = repository / file.relative_to(staged)
        if not target.is_file() or target.read_bytes() != file.read_bytes():
            file.replace(target)
            yield target


def read(source: str | Path) -> Graph:
    """Read a graph: a file's path, or its text.

    Its models are those of the repository that the file is in.

    Raises:
        PbtxtError: It does not parse.
        InvalidArgumentError: It is the configuration of a model.
        OSError: The file cannot be read.
    """
    is_text = isinstance(source, str) and ("\n" in source or "{" in source)
    path = Path("graph.pbtxt" if is_text else source)
    if not is_text and not is_graph(path):
        raise InvalidArgumentError(
            f"'{path}' is the configuration of a model; give a graph.pbtxt, or that of an ensemble"
        )
    given = GraphSource(str(source), str(path)) if is_text else graph_source(path)
    message, positions = parse(given.text, pb.Graph(), file=given.file)
    message.name = given.name or message.name
    graph = Graph(message, int(given.version or 1))
    graph.__doc__ = "\n".join(["", *head_comment(positions.text)])  # its first line is indented as the others are
    if not is_text and (place := repository_of(path)) is not None:
        known = models(place)
        graph.catalog, graph.graphs = known.catalog, known.graphs
    return graph


def head_comment(text: str) -> list[str]:
    """The lines of the comment with which a file begins."""
    comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return [line[1:].removeprefix(" ").rstrip() for line in comment]
