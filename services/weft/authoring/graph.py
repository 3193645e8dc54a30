"""``@weft.graph``: a function that is traced once, at decoration, to a ``pb.Graph``."""

import inspect
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from weft.authoring.faults import Place, fault, here, raise_at_place
from weft.authoring.fields import POLICY_FIELDS, check_known, fill_with_policy, known_fields, plain_name
from weft.authoring.message import GraphWriter
from weft.authoring.nodes import KINDS, run_body
from weft.authoring.steps import Draft, Step, Target
from weft.authoring.tensors import signature_of
from weft.authoring.tracing import Scope, Trace
from weft.base.text.pbtxt import Diagnostic, Positions, parse
from weft.base.text.pbtxt_writer import text_of
from weft.language.syntax.file import GraphError, GraphLookup, GraphSource, ModelCatalog
from weft.router.compile import check_graph, compile_graph
from weft_protos import graph_pb2 as pb

if TYPE_CHECKING:
    from weft.authoring.running import LoadedGraph, RunOptions, Stands
    from weft.v2.client.answer import Answer

_GRAPH_FIELDS = known_fields(pb.Graph.DESCRIPTOR, but=("name", "input", "output", "node")) | POLICY_FIELDS
_SEQUENCE_FIELDS = known_fields(KINDS["sequence"], pb.Ensembling.DESCRIPTOR, but=("step",))


class Graph:
    """A graph, as ``@weft.graph`` makes it. Called while another graph is traced, it is a step of that.

    Attributes:
        source_lines: Path of a field of the message, or of a message around it -> the line of Python that wrote it.
        diagnostics: What the compiler says of it; errors raise when it is made, so these are warnings.
        catalog: The models that its function used; None if it used none by a signature.
        graphs: Other graphs that it may call.
        called: The models and graphs in Python that its function has called.
    """

    def __init__(self, message: pb.Graph, version: int = 1, lines: Mapping[str, Place] = {}) -> None:
        self.message, self.version, self.source_lines = message, version, dict(lines)
        self.function: Callable[..., Any] | None = None
        self.catalog: ModelCatalog | None = None
        self.graphs: GraphLookup | None = None
        self.called: Sequence[Any] = ()
        self.diagnostics: list[Diagnostic] = []

    @property
    def name(self) -> str:
        """Name under which it is served."""
        return self.message.name

    @property
    def text(self) -> str:
        """The text of ``graph.pbtxt``; the docstring is the comment at its head."""
        return text_of(self.message, {"": inspect.cleandoc(self.__doc__ or "").splitlines()})

    @property
    def source(self) -> GraphSource:
        """The graph for the compiler."""
        folder = (
            f"{root}/graphs/{self.name}/{self.version}/" if (root := getattr(self.catalog, "repository", "")) else ""
        )
        return GraphSource(self.text, f"{folder}graph.pbtxt", self.name, str(self.version))

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
        graphs = Sources[GraphSource]([_OwnGraph(self), *([self.graphs] if self.graphs is not None else [])])
        target = Target("graph", self.name, catalog=self.catalog, graphs=graphs, owner=self)
        if self.catalog is not None:
            target = target.with_signature(compile_graph(self.source, self.catalog, self.graphs).signature)
        step: Step = target(*tensors, **keywords)
        return step

    def run(self, inputs: Mapping[str, Any], models: "Stands" = None, **options: Unpack["RunOptions"]) -> "Answer":
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
        self, inputs: Mapping[str, Any], models: "Stands" = None, **options: Unpack["RunOptions"]
    ) -> "Answer":
        """As ``run``, on the running event loop."""
        async with self.loaded(models) as loaded:
            return await loaded.run_async(inputs, **options)

    def stream(
        self, inputs: Mapping[str, Any], models: "Stands" = None, **options: Unpack["RunOptions"]
    ) -> Generator["Answer", None, None]:
        """As ``run``, but yield each response of a decoupled graph; their ``path`` is known after the last."""
        with self.loaded(models) as loaded:
            yield from loaded.stream(inputs, **options)

    def loaded(self, models: "Stands" = None) -> "LoadedGraph":
        """The graph with its models for a ``with`` block, which runs any number of requests."""
        from weft.authoring.running import LoadedGraph  # noqa: PLC0415  # which imports servers and backends

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


@overload
def graph(function: Callable[..., Any], /) -> Graph: ...
@overload
def graph(function: None = None, **fields: Any) -> Callable[[Callable[..., Any]], Graph]: ...
def graph(function: Callable[..., Any] | None = None, **fields: Any) -> Any:
    """Make a graph of a function of tensors, which runs once, at decoration.

    Its parameters are what requests bring; one with the default None is optional. ``-> weft.Outputs(...)`` is what
    answers have; without it, what the function returns.

    Args:
        fields: ``name`` (by default the function's), ``version`` and ``names`` (as ``@weft.node`` takes it); fields of
            ``Graph`` (``max_batch_size``, ``parameters``), of its ``Policy`` (``timeout_ms``) and of the root
            ``Sequence`` (``ordered``).

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
    version, name, names = given.pop("version", 1), given.pop("name"), given.pop("names", None)
    own = {key: value for key, value in given.items() if key in _GRAPH_FIELDS and value is not None}
    trace, root_name, message = Trace(), own.get("root", "root"), pb.Graph(name=name)
    trace.taken.add(root_name)
    body = {key: value for key, value in given.items() if key not in _GRAPH_FIELDS}
    root = Scope(trace, "sequence", root_name, place, None, True, body)
    writer = GraphWriter(message)
    writer.lines[""] = place
    try:
        check_known("@weft.graph", given, _GRAPH_FIELDS | _SEQUENCE_FIELDS | {"name", "names", "version"}, place)
        fill_with_policy(pb.Graph(), own, "", Draft())
        inputs, outputs = signature_of(function)
        if untyped := [key for key, one in inputs.items() if one is None]:
            cure = f"write {untyped[0]}: Tensor[DATATYPE, DIM, ...]"
            raise fault("G025", f"input '{untyped[0]}' of graph '{name}' has no type; {cure}", place)
        root = run_body(root, function, {}, names)
        root.node_fields.pop("output", None)
        writer.write(root, outputs, own)
    except GraphError as error:
        raise_at_place(error, function.__name__)
    made = Graph(message, version, writer.lines)
    made.function, made.__doc__ = function, function.__doc__
    made.catalog = Sources([*trace.catalogs]) if trace.catalogs else None
    made.called = [*trace.called]
    made.graphs = Sources([*trace.graphs]) if trace.graphs else None
    return made


Found = TypeVar("Found")


class Sources(Generic[Found]):
    """The models, or the graphs, of several sources; of two with one name those of the first."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._sources = sources
        self.repository = next((found for one in sources if (found := getattr(one, "repository", ""))), "")

    def find(self, name: str, version: str) -> Found | None:
        """What the first source that has it finds; version "" means the latest."""
        return next((found for one in self._sources if (found := one.find(name, version)) is not None), None)

    def names(self) -> list[str]:
        """Every name."""
        return [name for one in self._sources for name in one.names()]


class _OwnGraph:
    """A graph in Python, for graphs that call it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def find(self, name: str, version: str) -> GraphSource | None:
        """The graph, if it is asked for."""
        is_it = name == self._graph.name and version in ("", str(self._graph.version))
        return self._graph.source if is_it else None

    def names(self) -> list[str]:
        """Its name."""
        return [self._graph.name]
