"""Reads a model repository from its files alone: loads no model, needs no service."""

import errno
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft import backends as model
from weft.backends import postprocess, preprocess
from weft.base.errors import NotFoundError, WeftError
from weft.base.repository.layout import folders_of_models, is_model_folder, is_version, model_names, runs_in_router
from weft.base.text.pbtxt import Diagnostic, PbtxtError, suggestion
from weft.language import GraphError, GraphPlan, GraphSource
from weft.router.compile import compile_graph
from weft.router.repository.files import GraphRepository
from weft.serving.backends.base import Backend
from weft.serving.backends.loading import MissingPackageError, why_unreadable
from weft.serving.config import CONFIG_FILENAME, ModelDefinition, define_model
from weft.serving.config.placement import count_gpus
from weft.serving.lifecycle.repository import ModelRepository
from weft.tools.lock import LockCatalog, StaticCatalog

GRAPH_FILENAME = "graph.pbtxt"
GRAPH_FOLDER = "graphs"
_DEFAULT_REPOSITORY = Path("model_repository")
#: Folder in the repository -> backends that its service offers.
BACKENDS: Mapping[str, Mapping[str, type[Backend]]] = {
    "preprocess": preprocess.BACKENDS,
    "model": model.BACKENDS,
    "postprocess": postprocess.BACKENDS,
}
#: Configurations may name any device; only the service that loads them knows which exist.
_NUM_GPUS = 64


def backends_of(service: str) -> Mapping[str, type[Backend]]:
    """The backends of ``service``; of all services if it names none."""
    return BACKENDS.get(service) or ChainMap(*map(dict, BACKENDS.values()))


def is_graph(path: Path) -> bool:
    """Whether the file is a graph: any file except a ``config.pbtxt`` that declares no ensemble, or is not there."""
    return path.name != CONFIG_FILENAME or (path.exists() and runs_in_router(path))


def require_regular(path: Path) -> None:
    """Reject pipes and the like, on which a reader would block. Raises OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def graph_source(path: Path, text: str | bytes | None = None) -> GraphSource:
    """The graph in a file, or in the ``text``; folders in the repository's layout determine its name and version."""
    text = path.read_bytes() if text is None else text
    if path.name == CONFIG_FILENAME:
        return GraphSource(text, str(path), name=path.resolve().parent.name)
    version = path.resolve().parent
    if path.name == GRAPH_FILENAME and is_version(version.name):
        return GraphSource(text, str(path), name=version.parent.name, version=version.name)
    return GraphSource(text, str(path))


def graphs_around(path: Path) -> GraphRepository | None:
    """The graphs beside the one in a file, if its folders follow the repository's layout."""
    folders = path.resolve().parents
    if path.name == CONFIG_FILENAME and len(folders) > 1:
        return GraphRepository(folders[1])
    if path.name == GRAPH_FILENAME and len(folders) > 2 and is_version(folders[0].name):
        return GraphRepository(folders[2])
    return None


def graphs_of(repository: Path) -> GraphRepository | None:
    """The graphs of a repository, if it has a folder of them."""
    folder = repository / GRAPH_FOLDER
    return GraphRepository(folder) if folder.is_dir() else None


def repository_of(graph: Path) -> Path | None:
    """The repository that contains a graph's file, else ./model_repository; None if neither exists."""
    for folders in (graph.parents, graph.resolve().parents):  # the first as the caller spells it
        for folder in folders[:3]:
            if folder.name == GRAPH_FOLDER:
                return folder.parent
    if graph.name == CONFIG_FILENAME and len(graph.resolve().parents) > 1:  # models and ensembles side by side
        return graph.resolve().parents[1]
    return _DEFAULT_REPOSITORY if _DEFAULT_REPOSITORY.is_dir() else None


def model_folders(repository: Path) -> dict[str, tuple[str, Path]]:
    """Service and folder of each model by name; of duplicates the first, like a router. Raises OSError."""
    found: dict[str, tuple[str, Path]] = {}
    for service, folder in (folders_of_models(repository, tuple(BACKENDS)) or {"model": repository}).items():
        for name in ModelRepository(folder).names():
            if is_model_folder(folder / name):
                found.setdefault(name, (service, folder / name))
    return found


def define_offline(config: Path) -> ModelDefinition:
    """The model that a ``config.pbtxt`` declares, checked like in the server.

    A model without version folders counts as having version 1.

    Raises:
        OSError: There is no such file, or it is a pipe or the like.
        WeftError: The configuration is wrong.
    """
    require_regular(config)
    directory = config.resolve().parent
    versions = ModelRepository(directory.parent).versions(directory.name)
    backends = backends_of(directory.parent.name)
    return define_model(directory, versions or [1], backends, num_gpus=_NUM_GPUS, completes=bool(versions))


#: What is known of a model without loading it; no definition if its configuration is wrong.
Examination = tuple[ModelDefinition | None, list[Diagnostic]]


def examine(config: Path) -> Examination:
    """Define a model as ``define_offline``."""
    try:
        return define_offline(config), []
    except (WeftError, OSError) as error:
        return None, diagnostics_of(error, config)


def examine_files(config: Path, text: str | None = None) -> Examination:
    """Define a model as its service would, and check its files as far as that needs no loading.

    A ``text`` is read in place of the configuration. That this machine has no GPU, or not the packages that run the
    model, is a warning.
    """
    directory = config.parent.resolve()
    try:
        require_regular(config)
        models, backends = ModelRepository(directory.parent), backends_of(directory.parent.name)
        versions = models.versions(directory.name)
        define = partial(define_model, models.directory(directory.name), versions, backends, text=text)
        definition, found = _define_for(define, config)
    except (WeftError, OSError) as error:
        return None, diagnostics_of(error, config)
    for context in definition.contexts.values():
        try:
            definition.backend.num_slots(context)
            inner = replace(context, signature=context.signature.for_backend())
            definition.backend(inner, definition.instances[0]).check()
        except MissingPackageError as error:
            found += _warnings(diagnostics_of(error, config))
        except WeftError as error:
            found += diagnostics_of(error, config)
        except Exception as error:  # as in the service, whatever a backend raises is its answer
            text = why_unreadable(context.directory) or f"{type(error).__name__}: {error}"
            found.append(Diagnostic(str(config), 0, 0, f"model '{directory.name}' fails to load: {text}"))
    return definition, found


def _define_for(define: Callable[..., ModelDefinition], config: Path) -> tuple[ModelDefinition, list[Diagnostic]]:
    num_gpus = count_gpus()
    try:
        return define(num_gpus=num_gpus), []
    except PbtxtError as error:
        if num_gpus:
            raise
        definition = define(num_gpus=_NUM_GPUS)  # raises what is wrong on every machine
        return definition, _warnings(diagnostics_of(error, config))


def _warnings(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    return [replace(one, severity="warning") for one in found]


def diagnostics_of(error: WeftError | OSError, file: Path) -> list[Diagnostic]:
    """An error about a file as diagnostics, which name the file like the caller."""
    if isinstance(error, OSError):
        return [Diagnostic(str(file), 0, 0, f"cannot read '{error.filename or file}': {error.strerror}")]
    if not isinstance(error, PbtxtError):
        return [Diagnostic(str(file), 0, 0, error.message)]
    resolved = str(file.resolve())
    return [replace(d, file=str(file)) if d.file == resolved else d for d in error.diagnostics]


class OfflineCatalog(StaticCatalog):
    """The models of a repository, by the signatures in their configurations.

    Args:
        examine: Defines a model.

    Attributes:
        diagnostics: What is wrong with configurations, by file; those without a definition are not in the catalog.
    """

    def __init__(self, repository: Path, examine: Callable[[Path], Examination] = examine) -> None:
        super().__init__()
        self.repository = repository
        self.diagnostics: dict[Path, list[Diagnostic]] = {}
        folders = folders_of_models(repository, tuple(BACKENDS))
        for service, folder in (folders or {"model": repository}).items():
            for name in model_names(folder) if folder.is_dir() else ():
                if is_model_folder(folder / name):
                    self._add(service, folder / name / CONFIG_FILENAME, examine)

    def fault(self, model_name: str) -> str:
        """Return a message if the model's configuration has errors, else ""."""
        files = (file for file in self.diagnostics if file.parent.name == model_name)
        return next((f"its configuration has errors: {file}" for file in files), "")

    def _add(self, service: str, config: Path, examine: Callable[[Path], Examination]) -> None:
        definition, found = examine(config)
        if found:
            self.diagnostics[config.resolve()] = found
        if definition is None or config.parent.name in self._models:
            return  # of several, a router takes that of the first target
        for version, context in definition.contexts.items():
            self.add(config.parent.name, version, service, context.signature)


def stage(repository: Path, folders: Iterable[Path], replaced: Mapping[Path, str | Path | None], target: Path) -> Path:
    """Make a repository in ``target``, which is emptied first.

    Args:
        repository: Its files are linked to and never written.
        folders: Folders of models and graphs to include, relative to the repository.
        replaced: Replacements for entries of these folders, by path relative to the repository: text, a file or folder
            to link to, or None for nothing.

    Returns:
        ``target``.

    Raises:
        OSError: A folder cannot be read, or ``target`` written.
    """
    if target.exists():
        shutil.rmtree(target)
    wanted = list(dict.fromkeys(folders))
    if any(len(relative.parts) > 1 for relative in wanted):  # else models lie side by side
        (target / GRAPH_FOLDER).mkdir(parents=True)
    for relative in wanted:
        (target / relative).mkdir(parents=True, exist_ok=True)
        for entry in (repository / relative).resolve().iterdir():
            if relative / entry.name not in replaced and not entry.name.startswith("."):
                (target / relative / entry.name).symlink_to(entry)
    for place, content in replaced.items():
        if isinstance(content, str):
            (target / place).write_text(content)
        elif content is not None:
            (target / place).symlink_to(content.resolve())
    return target


def load_plan(graph: str, repository: Path | None = None, lock: Path | None = None) -> GraphPlan:
    """Compile a graph.

    Args:
        graph: A file or the name of a graph, NAME/VERSION for one version.
        repository: Models and other graphs; None: the repository that the file is in, else ./model_repository.
        lock: A file of signatures that replaces the repository's models.

    Raises:
        GraphError, PbtxtError: The graph, or a file that it depends on, has errors; ``diagnostics`` has each.
        NotFoundError: There is no such graph or repository.
        OSError: A file cannot be read.
    """
    if repository is not None and not repository.is_dir():
        raise NotFoundError(f"no such folder: {repository}")
    repository = repository or repository_of(Path(graph))
    graphs = graphs_of(repository) if repository is not None else None
    source = find_graph(graph, repository)
    if lock is not None:
        return compile_graph(source, LockCatalog(lock), graphs)
    if repository is None:
        raise NotFoundError(f"the models that '{graph}' calls are not known; give --repository DIR or --lock FILE")
    return _compile(source, OfflineCatalog(repository), graphs)


def find_graph(graph: str, repository: Path | None) -> GraphSource:
    """The graph of a file, or of this name in a repository. Raises NotFoundError or OSError."""
    path, graphs = Path(graph), graphs_of(repository) if repository is not None else None
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
        broken = [found for diagnostics in catalog.diagnostics.values() for found in diagnostics]
        raise GraphError([*error.diagnostics, *broken]) from None
