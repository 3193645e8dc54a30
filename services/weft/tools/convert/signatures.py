"""Signatures of the models and graphs that a file calls, and tensors common to the steps of a node."""

import errno
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.base.signature import ModelSignature
from weft.base.text.pbtxt import Diagnostic, PbtxtError, parse
from weft.language import GraphError
from weft.language.compiler.scope import spec_of
from weft.language.syntax.file import ModelCatalog
from weft.language.types.signatures import TensorType, dims_fit
from weft.router.compile import compile_graph
from weft.router.repository.files import GraphRepository
from weft.tools.convert.draft import CHECK, Draft, DraftNode, DraftStep, Tensors, check
from weft.tools.convert.yaml_tree import Source, YamlValue
from weft.tools.lock import LockCatalog
from weft.tools.offline import GRAPH_FOLDER, OfflineCatalog
from weft_protos import graph_pb2 as pb

_NO_TYPES = (
    "the file has no types. Say what a request brings and what an answer has, or convert again with --lock FILE or "
    "--repository DIR"
)
_UNKNOWN = (
    "no signature of {names}, so the graph's tensors are not known. Say what a request brings and what an answer has"
)


class Interface(NamedTuple):
    """Inputs, outputs and batch size of a step's target."""

    inputs: dict[str, TensorType]
    outputs: dict[str, TensorType]
    max_batch_size: int = 0


class Signatures:
    """Signatures from a catalog; None for unknown models."""

    def __init__(self, catalog: ModelCatalog | None = None) -> None:
        self._converted: dict[str, Interface | None] = {}
        self._catalog = catalog
        #: What is wrong with the files that have signatures, by model or graph.
        self._faults: dict[str, list[Diagnostic]] = {}

    def add(self, graph: str, interface: Interface | None) -> None:
        """Add the tensors of a converted graph, None if unknown; it hides others of its name."""
        self._converted[graph] = interface

    def model(self, name: str) -> Interface | None:
        """The target of a step that names a model, as a router finds it: the model, else the graph of that name."""
        found = self._catalog.find(name, "") if self._catalog is not None else None
        if found is None:
            return self.graph(name)
        return _interface(found[1])

    def graph(self, name: str) -> Interface | None:
        """Tensors of a graph."""
        return self._converted.get(name)

    def ask(self, source: Source, draft: Draft, unknown: Mapping[str, YamlValue]) -> None:
        """Ask for the tensors of a graph; ``unknown`` has the targets without a signature, with the calling place."""
        if self._catalog is None:
            check(source, draft.value, draft.remarks, _NO_TYPES)
            return
        draft.remarks.append(CHECK + _UNKNOWN.format(names=", ".join(unknown)))
        for name, value in unknown.items():
            source.warning(value, f"no signature of {listed([name])}")
            source.diagnostics += [replace(found, severity="warning") for found in self._faults.get(name, ())]


class RepositorySignatures(Signatures):
    """Tensors of the models and graphs of the repository in a folder."""

    def __init__(self, repository: Path) -> None:
        self._models = OfflineCatalog(repository)
        super().__init__(self._models)
        folder = repository / GRAPH_FOLDER
        self._graphs = GraphRepository(folder if folder.is_dir() else repository)
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
        {spec.name: TensorType.of(spec, is_batched=is_batched, origin="") for spec in specs}
        for specs in (signature.inputs, signature.outputs)
    )
    return Interface(inputs, outputs, signature.max_batch_size)


def shared_inputs(steps: list[DraftStep], interfaces: list[Interface]) -> dict[str, TensorType]:
    """Inputs of all steps; if each takes one tensor under a different name, the first step's name is used."""
    required = [[n for n, t in one.inputs.items() if not t.is_optional] for one in interfaces]
    if all(len(names) == 1 for names in required) and len({names[0] for names in required}) > 1:
        first, name = interfaces[0], required[0][0]
        for step, one, (own,) in zip(steps, interfaces, required, strict=True):
            if own != name and fits(first.inputs[name], one.inputs[own]):
                step.input_map[own] = name
    return merged(
        {step.input_map.get(name, name): tensor for name, tensor in one.inputs.items()}
        for step, one in zip(steps, interfaces, strict=True)
    )


def shared_outputs(
    source: Source, node: DraftNode, steps: list[DraftStep], interfaces: list[Interface]
) -> dict[str, TensorType]:
    """Outputs that every step gives; if each gives one under a different name, the first step's name is used."""
    answering = [(s, one.outputs) for s, one in zip(steps, interfaces, strict=True) if not s.shadow_percent]
    if not answering:
        return {}
    first = answering[0][1]
    common = {n: t for n, t in first.items() if all(n in outputs for _, outputs in answering)}
    if common or not first:
        return common
    if all(len(outputs) == 1 for _, outputs in answering):
        name, tensor = next(iter(first.items()))
        if all(fits(next(iter(outputs.values())), tensor) for _, outputs in answering):
            for step, outputs in answering[1:]:
                step.output_map |= {own: name for own in outputs if own != name}
            return {name: tensor}
    shown = "; ".join(f"'{step.name}' gives {listed(outputs)}" for step, outputs in answering)
    text = f"any one of these steps answers, so they need an output of the same name: {shown}"
    check(source, node.value, node.remarks, text)
    return {}


def merged(many: Iterable[Tensors]) -> dict[str, TensorType]:
    """All tensors by name; one that any of them requires is required."""
    found: dict[str, TensorType] = {}
    for tensors in many:
        for name, tensor in tensors.items():
            if name not in found or found[name].is_optional:
                found[name] = tensor
    return found


def fits(produced: TensorType, used: TensorType) -> bool:
    """Whether datatype and shape agree, with or without the batch dimension."""
    is_shape = dims_fit(produced.dims, used.dims) or dims_fit(produced.full_dims, used.full_dims)
    return produced.datatype == used.datatype and is_shape


def listed(names: Iterable[str]) -> str:
    """Names in quotes."""
    return ", ".join(f"'{name}'" for name in names) or "none"
