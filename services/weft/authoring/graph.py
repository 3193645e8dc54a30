"""``@weft.graph``: a function that is traced once, at decoration, to a ``pb.Graph``."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

from google.protobuf import text_format

from weft.authoring.faults import Place, fault, here, raise_at_place
from weft.authoring.fields import check_known, fill, known_fields, plain_name
from weft.authoring.message import GraphWriter
from weft.authoring.nodes import KINDS, run_body
from weft.authoring.running import LoadedGraph, RunOptions, Stands
from weft.authoring.steps import POLICY_FIELDS, Draft, Step, Target
from weft.authoring.tensors import signature_of
from weft.authoring.tracing import Scope, Trace
from weft.base.signature import ModelSignature
from weft.base.text.pbtxt import Diagnostic, Positions, parse
from weft.language.syntax.file import GraphError, GraphLookup, GraphSource, ModelCatalog
from weft.router.compile import check_graph
from weft.v2.client.answer import Answer
from weft_protos import graph_pb2 as pb

_GRAPH_FIELDS = known_fields(pb.Graph.DESCRIPTOR, but=("name", "input", "output", "node")) | POLICY_FIELDS
_SEQUENCE_FIELDS = known_fields(KINDS["sequence"], pb.Ensembling.DESCRIPTOR, but=("step",))


class Graph:
    """A graph, as ``@weft.graph`` makes it. Called while another graph is traced, it is a step of that.

    Attributes:
        name, version: As served.
        message: The ``pb.Graph``.
        source_lines: Path of a field of the message, or of a message around it -> the line of Python that wrote it.
        diagnostics: What the compiler says of it; errors raise when it is made, so these are warnings.
        catalog: The models that its function used; None if it used none by a signature.
        graphs: Other graphs that it may call.
    """

    def __init__(self, message: pb.Graph, version: int = 1, lines: Mapping[str, Place] = {}) -> None:
        self.message, self.version, self.source_lines = message, version, dict(lines)
        self.function: Callable[..., Any] | None = None
        self.catalog: ModelCatalog | None = None
        self.graphs: GraphLookup | None = None
        self.diagnostics: list[Diagnostic] = []

    @property
    def name(self) -> str:
        """Name under which it is served."""
        return self.message.name

    @property
    def text(self) -> str:
        """The text of ``graph.pbtxt``."""
        return graph_text(self.message)

    @property
    def source(self) -> GraphSource:
        """The graph for the compiler."""
        folder = (
            f"{root}/graphs/{self.name}/{self.version}/" if (root := getattr(self.catalog, "repository", "")) else ""
        )
        return GraphSource(graph_text(self.message), f"{folder}graph.pbtxt", self.name, str(self.version))

    def check(self, models: Any = None) -> list[Diagnostic]:
        """What the compiler says: errors and warnings, on the lines of Python that they are about.

        Args:
            models: What ``weft.models`` gives, in place of the models with which the graph was written.
        """
        source = self.source
        positions = parse(source.text, pb.Graph(), file=source.file)[1]
        found = check_graph(
            source, models.catalog if models else self.catalog, models.graphs if models else self.graphs
        )
        if not self.source_lines:
            return found
        return [self._moved(one, source.file, positions) for one in found]

    def place_of(self, path: str) -> Place:
        """The line of Python that wrote a field: ``node[0].sequence.step[1].when``."""
        while path and path not in self.source_lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.source_lines[path]

    def __call__(self, *tensors: Any, **keywords: Any) -> Step:
        """Make a step that runs the graph; arguments are those of a call of a model."""
        inputs = {one.name: None for one in self.message.input}
        outputs = {one.name: None for one in self.message.output} or None
        return Target("graph", self.name, inputs, outputs, self.catalog, graphs=_OwnGraph(self))(*tensors, **keywords)

    def run(self, inputs: Mapping[str, Any], models: Stands = None, **options: Unpack[RunOptions]) -> Answer:
        """Load the graph in this process, answer one request as a server does, and close it.

        Args:
            inputs: Numpy arrays as they are, or lists and numbers, which become the type of the input and may lack the
                batch dimension.
            models: By name, ``weft.fake(...)`` or models made in Python; the others that the graph reaches are those of
                its repository.
            options: ``parameters``, ``headers``, ``timeout_ms``, ``outputs`` and ``request_id`` of the request.

        Raises:
            WeftError: The graph or a model cannot be loaded; or what a server would answer, with its ``path``.
            Exception: A fake is wrong, or its function raised this.
        """
        with self.loaded(models) as loaded:
            return loaded.run(inputs, **options)

    async def run_async(
        self, inputs: Mapping[str, Any], models: Stands = None, **options: Unpack[RunOptions]
    ) -> Answer:
        """As ``run``, on the running event loop."""
        async with self.loaded(models) as loaded:
            return await loaded.run_async(inputs, **options)

    def stream(
        self, inputs: Mapping[str, Any], models: Stands = None, **options: Unpack[RunOptions]
    ) -> Iterator[Answer]:
        """As ``run``, but yield each response of a decoupled graph; their ``path`` is known after the last."""
        with self.loaded(models) as loaded:
            yield from loaded.stream(inputs, **options)

    def loaded(self, models: Stands = None) -> LoadedGraph:
        """The graph with its models for a ``with`` block, which runs any number of requests."""
        return LoadedGraph(self, models)

    def _moved(self, one: Diagnostic, file: str, positions: Positions) -> Diagnostic:
        def line(match: re.Match[str]) -> str:
            place = self.place_of(positions.path_at(int(match[1]), int(match[2])))
            return f"{place.file}:{place.line}"

        message = re.sub(rf"{re.escape(file)}:(\d+):(\d+)", line, one.message)
        if one.file != file:
            return replace(one, message=message)
        place = self.place_of(positions.path_at(one.line, one.column))
        return replace(fault(one.code, message, place).diagnostics[0], severity=one.severity)


def graph_text(message: pb.Graph) -> str:
    """The message in protobuf text format."""
    return str(text_format.MessageToString(message, as_utf8=True))


@overload
def graph(function: Callable[..., Any], /) -> Graph: ...
@overload
def graph(function: None = None, **fields: Any) -> Callable[[Callable[..., Any]], Graph]: ...
def graph(function: Callable[..., Any] | None = None, **fields: Any) -> Any:
    """Make a graph of a function of tensors, which runs once, at decoration.

    Its parameters are what requests bring; one with the default None is optional. ``-> weft.Outputs(...)`` is what
    answers have; without it, what the function returns.

    Args:
        fields: ``name`` (by default the function's) and ``version``; fields of ``Graph`` (``max_batch_size``,
            ``parameters``), of its ``Policy`` (``timeout_ms``, ``retry``) and of the root ``Sequence`` (``ordered``).

    Returns:
        A ``Graph``.

    Raises:
        GraphError: Whatever the compiler finds wrong, on the line that is wrong.
    """
    place = here()
    return (
        _traced(function, fields, place) if function is not None else lambda function: _traced(function, fields, place)
    )


def _traced(function: Callable[..., Any], fields: Mapping[str, Any], place: Place) -> Graph:
    made = trace_graph(function, fields, place)
    made.diagnostics = made.check()
    if errors := [one for one in made.diagnostics if one.severity == "error"]:
        raise_at_place(GraphError(errors), function.__name__)
    return made


def trace_graph(function: Callable[..., Any], fields: Mapping[str, Any], place: Place) -> Graph:
    """The graph of a function, not yet compiled. Raises GraphError."""
    given = {"name": function.__name__, "platform": "graph"} | {plain_name(name): one for name, one in fields.items()}
    version, name = given.pop("version", 1), given.pop("name")
    own = {key: value for key, value in given.items() if key in _GRAPH_FIELDS and value is not None}
    trace, root_name, message = Trace(), own.get("root", "root"), pb.Graph(name=name)
    trace.taken.add(root_name)
    body = {key: value for key, value in given.items() if key not in _GRAPH_FIELDS}
    root = Scope(trace, "sequence", root_name, place, None, True, body)
    writer = GraphWriter(message)
    writer.lines[""] = place
    try:
        check_known("@weft.graph", given, _GRAPH_FIELDS | _SEQUENCE_FIELDS | {"name", "version"}, place)
        fill(pb.Graph(), {key: value for key, value in own.items() if key not in POLICY_FIELDS}, "", Draft())
        fill(pb.Policy(), {key: value for key, value in own.items() if key in POLICY_FIELDS}, "", Draft())
        inputs, outputs = signature_of(function)
        if untyped := [key for key, one in inputs.items() if one is None]:
            cure = f"write {untyped[0]}: Tensor[DATATYPE, DIM, ...]"
            raise fault("G025", f"input '{untyped[0]}' of graph '{name}' has no type; {cure}", place)
        root = run_body(root, function)
        root.node_fields.pop("output", None)
        writer.write(root, outputs, own)
    except GraphError as error:
        raise_at_place(error, function.__name__)
    made = Graph(message, version, writer.lines)
    made.function, made.__doc__ = function, function.__doc__
    made.catalog, made.graphs = _joined_catalogs(trace), _joined_graphs(trace)
    return made


class _Catalogs:
    """The models of several sources."""

    def __init__(self, catalogs: Sequence[ModelCatalog]) -> None:
        self._catalogs = catalogs
        self.repository = next((found for one in catalogs if (found := getattr(one, "repository", ""))), "")

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """Target and signature of a model, from the first that has it."""
        return next((found for one in self._catalogs if (found := one.find(model_name, version)) is not None), None)

    def names(self) -> list[str]:
        """Every model name."""
        return [name for one in self._catalogs for name in one.names()]


class _Graphs:
    """The graphs of several sources."""

    def __init__(self, lookups: Sequence[GraphLookup]) -> None:
        self._lookups = lookups

    def find(self, name: str, version: str) -> GraphSource | None:
        """The file of a graph, from the first that has it."""
        return next((found for one in self._lookups if (found := one.find(name, version)) is not None), None)

    def names(self) -> list[str]:
        """Every graph name."""
        return [name for one in self._lookups for name in one.names()]


class _OwnGraph:
    """A graph in Python, and those that it calls, for graphs that call it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def find(self, name: str, version: str) -> GraphSource | None:
        """The graph if it is asked for, else one of those that it calls."""
        if name == self._graph.name and version in ("", str(self._graph.version)):
            return self._graph.source
        return self._graph.graphs.find(name, version) if self._graph.graphs is not None else None

    def names(self) -> list[str]:
        """Its name, and those of the graphs that it calls."""
        return [self._graph.name, *(self._graph.graphs.names() if self._graph.graphs is not None else ())]


def _joined_catalogs(trace: Trace) -> ModelCatalog | None:
    return _Catalogs([*trace.catalogs]) if trace.catalogs else None


def _joined_graphs(trace: Trace) -> GraphLookup | None:
    return _Graphs([*trace.graphs]) if trace.graphs else None
