"""``weft.models``: the models and graphs of a repository by their signatures, from files alone."""

from functools import cached_property
from pathlib import Path
from typing import cast

from typing_extensions import TypeVar

from weft.authoring.faults import fault, lacks
from weft.authoring.steps import Target
from weft.base.signature import ModelSignature
from weft.base.text.pbtxt import suggestion
from weft.language.syntax.file import GraphLookup
from weft.router.compile import compile_graph
from weft.tools.lock import LockCatalog, StaticCatalog
from weft.tools.offline import OfflineCatalog, graphs_of


class Models:
    """Models and graphs as attributes: ``m.digits_cnn(pixels)``; ``m["a-name"]`` where a name is no word of Python."""

    def __init__(self, repository: Path | None, lock: Path | None) -> None:
        self._repository, self._lock = repository, lock

    @cached_property
    def catalog(self) -> StaticCatalog:
        """The models, for the compiler."""
        if self._lock is None:
            return OfflineCatalog(self._repository) if self._repository is not None else StaticCatalog()
        catalog = LockCatalog(self._lock)
        catalog.repository = self._repository
        return catalog

    @cached_property
    def graphs(self) -> GraphLookup | None:
        """The graphs of the repository, for the compiler; None if it has none."""
        return graphs_of(self._repository) if self._repository is not None else None

    def names(self) -> list[str]:
        """Every model and graph."""
        return sorted({*self.catalog.names(), *(self.graphs.names() if self.graphs is not None else ())})

    def __getattr__(self, name: str) -> Target:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Target:
        field, signature = self.find(name)
        return Target(field, name, catalog=self.catalog, graphs=self.graphs).with_signature(signature)

    def find(self, name: str) -> tuple[str, ModelSignature]:
        """The field of ``Step`` that names it, and its signature. Raises GraphError: unknown, or it has errors."""
        found = self.catalog.find(name, "")
        if found is not None:
            return "model_name", found[1]
        source = self.graphs.find(name, "") if self.graphs is not None else None
        if source is not None:
            return "graph", compile_graph(source, self.catalog, self.graphs).signature
        why = self.catalog.fault(name) if isinstance(self.catalog, OfflineCatalog) else ""
        where = self._lock or self._repository
        raise lacks(
            f"there is no model or graph '{name}' in {where}; {why}"
            if why
            else f"there is no model or graph '{name}' in {where}{suggestion(name, self.names())}",
            "G002",
        )

    def __dir__(self) -> list[str]:
        return self.names()


ModelsType = TypeVar("ModelsType", default=Models)


def models(
    repository: str | Path | None = None, lock: str | Path | None = None, types: type[ModelsType] | None = None
) -> ModelsType:
    """The models and graphs that a graph may call; no model is loaded, and no service is asked.

    Args:
        repository: A model repository; by default ``./model_repository`` where no lock is given.
        types: Class that ``weft stubs`` wrote; ``m: Models = weft.models(...)`` has the same effect.
        lock: A file that ``weft lock`` wrote, for the signatures of models; graphs still come from the repository.

    Raises:
        GraphError: There is no such folder or file (G002).
    """
    folder = Path(repository) if repository is not None else None if lock is not None else Path("model_repository")
    file = Path(lock) if lock is not None else None
    for path, is_there in ((folder, folder is None or folder.is_dir()), (file, file is None or file.is_file())):
        if not is_there:
            raise fault(
                "G002", f"there is no {path}; give the path of a model repository, or lock= and a file of signatures"
            )
    return cast(ModelsType, Models(folder, file))
