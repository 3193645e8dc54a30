"""Compiles a graph file to an executable plan, or reports all its errors.

It passes the node kinds and step policies of the router to the compiler in ``weft.language``.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from weft.base.errors import WeftError
from weft.base.repository.layout import read_label_file
from weft.base.signature import ModelSignature, TensorSpec, allows_empty_batch
from weft.base.text.pbtxt import Diagnostic, PbtxtError
from weft.language.checks.costs import check_amplification, check_latency
from weft.language.checks.fields import check_responses
from weft.language.compiler.name_table import NameTable
from weft.language.compiler.nodes import NodeBuilder, required_outputs
from weft.language.compiler.resolve import Resolver
from weft.language.compiler.scope import BuiltNode, NodeUse, ResponseCount, declared_types, spec_of
from weft.language.plan import GraphPlan
from weft.language.syntax.file import (
    GraphError,
    GraphFile,
    GraphLookup,
    GraphReport,
    GraphSource,
    ModelCatalog,
    NodeDefinition,
)
from weft.language.syntax.parse import parse_graph
from weft.router.operators import KINDS
from weft.router.policies import POLICIES


def compile_graph(source: GraphSource, catalog: ModelCatalog, graphs: GraphLookup | None = None) -> GraphPlan:
    """Check and compile a graph.

    Args:
        graphs: Other graphs, which steps may name; None if there are none.

    Raises:
        GraphError: With every error and warning, not just the first.
    """
    return compile_with_warnings(source, catalog, graphs)[0]


def compile_with_warnings(
    source: GraphSource, catalog: ModelCatalog, graphs: GraphLookup | None = None
) -> tuple[GraphPlan, list[Diagnostic]]:
    """Like ``compile_graph``, and return the warnings too, sorted by position. Raises GraphError."""
    report = GraphReport(source.file)
    plan = _compile(source, catalog, graphs, report)
    if plan is None or report.has_errors:
        raise GraphError(report.diagnostics())
    return plan, report.diagnostics()


def names_called(source: GraphSource) -> set[str]:
    """The models and graphs that a graph imports, and that its steps name; none if it does not parse."""
    try:
        file = parse_graph(source, KINDS, POLICIES)
    except PbtxtError:
        return set()
    customs = (step for node in file.all_nodes for custom in node.customs.values() for step in custom.chain())
    steps = (*customs, *(step for node in file.all_nodes for step in node.every_step()))
    imported = {one.graph for one in getattr(file.message, "import")}
    return imported | {name for step in steps if (name := step.message.model_name or step.message.graph)}


def check_graph(
    source: GraphSource, catalog: ModelCatalog | None = None, graphs: GraphLookup | None = None
) -> list[Diagnostic]:
    """Return every error and warning of a graph, sorted by position; empty if there are none.

    Args:
        catalog: Models that exist; None skips checks that need them: unknown targets, names and types of their
            tensors.
    """
    report = GraphReport(source.file)
    _compile(source, catalog, graphs, report)
    return report.diagnostics()


def _compile(
    source: GraphSource, catalog: ModelCatalog | None, graphs: GraphLookup | None, report: GraphReport
) -> GraphPlan | None:
    resolver = Resolver(KINDS, POLICIES, catalog, graphs, report)
    file = resolver.load(source)
    root = file.nodes.get(file.root) if file else None
    if file is None or root is None:
        return None
    names = NameTable(resolver, KINDS, report)
    for node in file.all_nodes:
        names.of(file, node)  # reports unknown names also in nodes that no step runs
    builder = NodeBuilder(names, KINDS, report)
    wanted = frozenset(names.of(file, root).outputs)
    given = declared_types(file, root, file.message.input)
    required = frozenset(required_outputs(file, wanted))
    call = NodeUse(given, {}, wanted, root.name, ((file.label, root.name),), required)
    built = builder.build_node(file, root, call)
    _check_inputs(file, root, names, report)
    check_responses(file, report, streams=built.responses > ResponseCount.ONE, is_known=not _is_open(file, names))
    if report.has_errors or built.plan is None:
        return None
    message = file.message
    plan = GraphPlan(
        signature=_signature(file, built, _labels(file, report)),
        root=built.plan,
        dialect=file.dialect,
        timeout_ms=message.policy.timeout_ms,
        max_inflight=message.policy.max_inflight,
        cache=builder.cache,
        dependencies=frozenset(builder.dependencies),
    )
    check_latency(file, plan, report)
    check_amplification(file, plan, report)
    return plan


def _check_inputs(file: GraphFile, root: NodeDefinition, names: NameTable, report: GraphReport) -> None:
    known, is_error = names.of(file, root), file.dialect.must_read_all
    if any(step.is_open for step in known.steps) or root.kind is None or (report.has_errors and not is_error):
        return
    for i, spec in enumerate(file.message.input):
        if not known.reads_input(spec.name):
            add = report.error if is_error else report.warning
            add("G026", file, f"input[{i}].name", file.dialect.unread_input(file.name, spec.name))


def _is_open(file: GraphFile, names: NameTable) -> bool:
    every = (names.of(file, node) for node in file.all_nodes)
    return any(step.is_open for node in every for step in (*node.steps, *node.customs.values()))


def _signature(file: GraphFile, built: BuiltNode, labels: Mapping[str, tuple[str, ...]]) -> ModelSignature:
    message = file.message
    outputs = [*dict.fromkeys(spec_of(tensor) for tensor in message.output)] or [
        TensorSpec(name, known.datatype, known.dims) for name, known in built.outputs.items()
    ]
    absent = {name for name, known in built.outputs.items() if known.is_optional}
    known = {**{name: tensor.labels for name, tensor in built.outputs.items()}, **labels}
    outputs = [
        replace(spec, is_optional=spec.is_optional or spec.name in absent, labels=known.get(spec.name, ()))
        for spec in outputs
    ]
    return ModelSignature(
        name=file.name,
        version=file.source.version,
        platform=file.dialect.platform,
        max_batch_size=message.max_batch_size,
        inputs=tuple(dict.fromkeys(spec_of(tensor) for tensor in message.input)),
        outputs=tuple(outputs),
        allows_empty_batch=allows_empty_batch(message.parameters),
        is_decoupled=built.responses > ResponseCount.ONE,
        can_collect=built.responses is ResponseCount.COLLECTABLE,
    )


def _labels(file: GraphFile, report: GraphReport) -> dict[str, tuple[str, ...]]:
    """Names of classes by output, of label files in the graph's folder or in its version's."""
    path, labels = Path(file.source.file), dict[str, tuple[str, ...]]()
    folder = path.parent if path.parent.name == file.source.version else path.parent / file.source.version
    for i, output in enumerate(file.message.output):
        try:
            if output.label_filename:
                lines = read_label_file(folder, output.label_filename)[1]
                labels[output.name] = tuple(line.decode() for line in lines)
        except (WeftError, OSError, UnicodeDecodeError) as error:
            text = f"cannot read labels '{output.label_filename}': {error}"
            report.error("G024", file, f"output[{i}].label_filename", text)
    return labels
