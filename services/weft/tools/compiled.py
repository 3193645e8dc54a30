"""A graph compiled from files alone, without a server."""

from pathlib import Path

from weft.base.errors import NotFoundError
from weft.base.text.pbtxt import Diagnostic, suggestion
from weft.language import GraphError, GraphPlan, GraphSource
from weft.router.compile import check_graph, compile_graph
from weft.router.repository.files import GraphRepository
from weft.tools.lock import LockCatalog
from weft.tools.offline import OfflineCatalog, graph_source, graphs_of, is_graph, repository_of


def load_plan(graph: str, repository: Path | None = None, lock: Path | None = None) -> GraphPlan:
    """The plan of a graph.

    Args:
        graph: A file or the name of a graph, NAME/VERSION for one version.
        repository: Models and other graphs; None: the repository that the file is in, else ./model_repository.
        lock: A file of signatures that stands in for the repository's models.

    Raises:
        GraphError, PbtxtError: The graph, or a file that it depends on, has errors; ``diagnostics`` has each.
        NotFoundError: There is no such graph or repository.
        OSError: A file cannot be read.
    """
    if repository is not None and not repository.is_dir():
        raise NotFoundError(f"no such folder: {repository}")
    repository = repository or repository_of(Path(graph))
    graphs = graphs_of(repository) if repository is not None else None
    source = _find(graph, repository, graphs)
    if lock is not None:
        return compile_graph(source, LockCatalog(lock), graphs)
    if repository is None:
        raise NotFoundError(f"the models that '{graph}' calls are not known; give --repository DIR or --lock FILE")
    return _compile(source, OfflineCatalog(repository), graphs)


def _find(graph: str, repository: Path | None, graphs: GraphRepository | None) -> GraphSource:
    path = Path(graph)
    if path.is_file():
        if not is_graph(path):
            raise NotFoundError(f"'{graph}' is the configuration of a model, not a graph")
        return graph_source(path)
    name, _, version = graph.partition("/")
    found = graphs.find(name, version) if graphs is not None else None
    if found is not None:
        return found
    known = graphs.scan() if graphs is not None else {}
    if name in known:
        versions = ", ".join(file.version for file in known[name])
        raise NotFoundError(f"graph '{name}' has no version '{version}'; it has {versions}")
    if path.is_dir() and path.name not in known:
        raise NotFoundError(f"'{graph}' is a folder; give a graph file in it, or the name of a graph")
    if repository is None:
        raise NotFoundError(f"'{graph}' is no file; to find a graph by its name, give --repository DIR")
    raise NotFoundError(f"'{graph}' is no file and no graph of '{repository}'{suggestion(name, known)}")


def _compile(source: GraphSource, catalog: OfflineCatalog, graphs: GraphRepository | None) -> GraphPlan:
    try:
        return compile_graph(source, catalog, graphs)
    except GraphError as error:
        if not catalog.undeclared:
            broken = [found for diagnostics in catalog.diagnostics.values() for found in diagnostics]
            raise GraphError([*error.diagnostics, *broken]) from None
    names = ", ".join(sorted(catalog.undeclared))
    text = f"inputs or outputs of {names} are not in the configuration; give signatures with --lock FILE"
    raise GraphError([*check_graph(source, None, graphs), Diagnostic(source.file, 0, 0, text)])
