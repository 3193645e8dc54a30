"""Parses a graph file to nodes by name.

``ensemble_scheduling`` of Triton Inference Server becomes a root node, and fields foreign to the dialect are removed,
so that later phases see one form: where rules differ, they ask the file's ``Dialect``.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from google.protobuf.message import Message

from weft.base.text.pbtxt import Diagnostic, PbtxtError, Positions, parse
from weft.language.dialects import Dialect, dialect_of
from weft.language.plan import GraphPlan
from weft.language.syntax.file import GraphFile, GraphSource, KindSyntax, NodeDefinition, PolicyKind, StepDefinition
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig

#: Names that stand unquoted in paths and metadata.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")


def parse_graph(source: GraphSource, kinds: Mapping[str, KindSyntax], policies: Mapping[str, PolicyKind]) -> GraphFile:
    """Parse a file without checking it.

    Raises:
        PbtxtError: It does not parse; every diagnostic has code G001.
    """
    message, positions = _parsed(source)
    dialect = dialect_of(message)
    foreign = _without_foreign(message, positions, dialect)
    root = message.root or "root"
    nodes = [node_definition(node, f"node[{i}]", kinds) for i, node in enumerate(message.node)]
    if message.HasField("ensemble_scheduling"):
        path, given = "ensemble_scheduling", message.ensemble_scheduling
        sequence = pb.Sequence(step=given.step, max_inflight_responses=given.max_inflight_requests)
        nodes.insert(0, node_definition(pb.Node(name=root, sequence=sequence), path, kinds, kind_path=path))
    return GraphFile(
        source=source,
        name=source.name or message.name,
        message=message,
        positions=positions,
        dialect=dialect,
        foreign=foreign,
        root=root,
        kinds=kinds,
        policies=policies,
        nodes={node.name: node for node in reversed(nodes)},
        all_nodes=nodes,
    )


def model_config(source: GraphSource, plan: GraphPlan) -> ModelConfig:
    """The graph as a ``ModelConfig``: without Weft's own fields, with name and inferred outputs filled in."""
    config = ModelConfig.FromString(_parsed(source)[0].SerializeToString())
    config.DiscardUnknownFields()
    config.name = plan.signature.name
    config.platform = plan.signature.platform
    if not config.output:
        for spec in plan.signature.outputs:
            data_type = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
            config.output.add(name=spec.name, data_type=data_type, dims=spec.dims)
    return config


def targets_of(step: pb.Step) -> list[str]:
    """Which target fields are given."""
    return [name for name in ("model_name", "node", "graph") if getattr(step, name)]


def given_fields(message: pb.Graph | pb.Step | pb.Policy, names: Iterable[str]) -> list[tuple[str, bool]]:
    """(name, whether the message has it) of each."""
    present = {field.name for field, _ in message.ListFields()}
    return [(name, name in present) for name in names]


def _parsed(source: GraphSource) -> tuple[pb.Graph, Positions]:
    try:
        message, positions = parse(source.text, pb.Graph(), file=source.file)
    except PbtxtError as error:
        raise PbtxtError([replace(found, code="G001") for found in error.diagnostics]) from None
    if not message.ListFields():
        raise PbtxtError([Diagnostic(source.file, 0, 0, "the file is empty; a graph has at least one node", "G001")])
    return message, positions


def _without_foreign(message: pb.Graph, positions: Positions, dialect: Dialect) -> list[str]:
    """Remove fields that the dialect does not have; returns their paths."""
    found = [name for name in dialect.foreign_fields if name in positions]
    _clear(message, found)
    for i, step in enumerate(message.ensemble_scheduling.step if dialect.step_fields else ()):
        foreign = [field.name for field, _ in step.ListFields() if field.name not in dialect.step_fields]
        _clear(step, foreign)
        found += [f"ensemble_scheduling.step[{i}].{name}" for name in foreign]
    return found


def _clear(message: Message, names: Iterable[str]) -> None:
    for name in names:
        message.ClearField(name)


def node_definition(node: pb.Node, path: str, kinds: Mapping[str, KindSyntax], kind_path: str = "") -> NodeDefinition:
    """One node of a file; ``kind_path`` is that of its kind's message, if it is not at ``path``."""
    field_name = node.WhichOneof("kind")
    if field_name is None:
        return NodeDefinition(node.name, path, node, None, path, ())
    kind = kinds[field_name]
    kind_path = kind_path or f"{path}.{field_name}"
    every = _steps(getattr(node, field_name).step, kind_path)
    shadows = tuple(step for step in every if step.is_shadow and not kind.plan.runs_shadows)
    customs = {
        key: StepDefinition(step.name or _target(step), step_path, step)
        for key, step_path, step in kind.custom_steps(node, kind_path)
        if targets_of(step) == ["model_name"]
    }
    steps = tuple(step for step in every if not step.is_shadow or kind.plan.runs_shadows)
    return NodeDefinition(node.name, path, node, kind, kind_path, steps, shadows, customs)


def _steps(steps: Sequence[pb.Step], path: str) -> tuple[StepDefinition, ...]:
    definitions = []
    for i, (name, step) in enumerate(zip(step_names(steps), steps, strict=True)):
        step_path = f"{path}.step[{i}]"
        definitions.append(
            StepDefinition(name, step_path, step, _fallback(step, step_path), is_shadow=step.HasField("shadow"))
        )
    return tuple(definitions)


def step_names(steps: Sequence[pb.Step]) -> list[str]:
    """Names of the steps of a node; a generated name that is taken gets a number."""
    taken = Counter(step.name for step in steps if step.name)
    names = []
    for i, step in enumerate(steps):
        name = step.name
        if not name:
            given = step.case[0] if step.case and NAME.fullmatch(step.case[0]) else ""
            base = name = given or _target(step) or f"step{i}"
            while taken[name]:
                taken[base] += 1
                name = f"{base}-{taken[base]}"
            taken[name] += 1
        names.append(name)
    return names


def _fallback(step: pb.Step, path: str) -> StepDefinition | None:
    if not step.HasField("fallback"):
        return None
    message, path = step.fallback, f"{path}.fallback"
    return StepDefinition(message.name or _target(message) or "fallback", path, message, _fallback(message, path))


def _target(step: pb.Step) -> str:
    return step.model_name or step.node or step.graph
