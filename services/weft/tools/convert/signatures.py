"""What is known of the tensors of the models and graphs that a file calls."""

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from weft.base.signature import ModelSignature
from weft.base.text.pbtxt import Diagnostic, PbtxtError, parse
from weft.language import GraphError
from weft.language.compiler.scope import spec_of
from weft.language.syntax.source import ModelCatalog
from weft.router.compile import compile_graph
from weft.router.repository.files import GraphRepository
from weft.tools.convert.draft import CHECK, Draft, DraftTensor, check
from weft.tools.convert.shared import Interface, listed
from weft.tools.convert.yaml_tree import Source, YamlValue
from weft.tools.lock import LockCatalog
from weft.tools.offline import GRAPH_FOLDER, OfflineCatalog
from weft_protos import graph_pb2 as pb

_NO_TYPES = (
    "the file has no types. Say what a request brings and what an answer has, or convert again with --lock FILE or "
    "--repository DIR"
)
_UNKNOWN = "no signature of {names}, so the graph's tensors are not known. Say what a request brings and what an "
_UNKNOWN += "answer has"


class Signatures:
    """Tensors of the models of a catalog, and of the graphs of a repository.

    Args:
        catalog: Signatures of models; None: not known.
    """

    def __init__(self, catalog: ModelCatalog | None = None) -> None:
        self._converted: dict[str, Interface | None] = {}
        self._catalog = catalog
        #: Models whose configuration leaves tensors to the backend.
        self._undeclared: set[str] = set()
        #: What is wrong with the files that have signatures, by model or graph.
        self._faults: dict[str, list[Diagnostic]] = {}

    def add(self, graph: str, interface: Interface | None) -> None:
        """Note the tensors of a converted graph, None if they are not known; it comes before any other of its name."""
        self._converted[graph] = interface

    def model(self, name: str) -> Interface | None:
        """What a step that names a model calls, as a router finds it: the model, else the graph of that name."""
        found = self._catalog.find(name, "") if self._catalog is not None else None
        if found is None:
            return self.graph(name)
        return None if name in self._undeclared else _interface(found[1])

    def graph(self, name: str) -> Interface | None:
        """Tensors of a graph."""
        return self._converted.get(name)

    def ask(self, source: Source, draft: Draft, unknown: Mapping[str, YamlValue]) -> None:
        """Ask for the tensors of a graph.

        Args:
            source: The file.
            draft: The graph.
            unknown: The models and graphs without a signature, each with the place that calls it.
        """
        if self._catalog is None:
            check(source, draft.value, draft.remarks, _NO_TYPES)
            return
        draft.remarks.append(CHECK + _UNKNOWN.format(names=", ".join(unknown)))
        for name, value in unknown.items():
            why = ": its configuration does not have all inputs and outputs" if name in self._undeclared else ""
            source.warning(value, f"no signature of {listed([name])}{why}")
            source.diagnostics += [replace(found, severity="warning") for found in self._faults.get(name, ())]


class RepositorySignatures(Signatures):
    """Tensors of the models and graphs of a repository.

    Args:
        repository: The folder.
    """

    def __init__(self, repository: Path) -> None:
        self._models = OfflineCatalog(repository)
        super().__init__(self._models)
        folder = repository / GRAPH_FOLDER
        self._graphs = GraphRepository(folder if folder.is_dir() else repository)
        self._undeclared = self._models.undeclared
        self._faults = {file.parent.name: found for file, found in self._models.diagnostics.items()}

    def graph(self, name: str) -> Interface | None:
        """Tensors of a graph, as its file declares them; outputs that it leaves out are those of its root."""
        if name in self._converted:
            return self._converted[name]
        try:
            found = self._graphs.find(name, "")
            if found is None:
                return None
            message, _ = parse(found.text, pb.Graph(), file=found.file)
            if not message.output:
                return _interface(compile_graph(found, self._models, self._graphs).signature)
        except (GraphError, PbtxtError) as error:
            self._faults[name] = error.diagnostics
            return None
        inputs, outputs = (tuple(map(spec_of, tensors)) for tensors in (message.input, message.output))
        return _interface(ModelSignature(name, found.version, "graph", message.max_batch_size, inputs, outputs))


def signatures_for(repository: Path | None, lock: Path | None) -> Signatures:
    """The signatures of a lock file or of a repository; none where neither is given.

    Raises:
        OSError: The file or folder cannot be read.
        PbtxtError: It is no lock file.
    """
    if repository is None:
        return Signatures(LockCatalog(lock) if lock is not None else None)
    if not repository.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(repository))
    return RepositorySignatures(repository)


def _interface(signature: ModelSignature) -> Interface:
    is_batched = signature.max_batch_size > 0
    inputs, outputs = (
        {s.name: DraftTensor(s.datatype, s.dims, is_batched, s.is_optional) for s in specs}
        for specs in (signature.inputs, signature.outputs)
    )
    return Interface(inputs, outputs, signature.max_batch_size)
