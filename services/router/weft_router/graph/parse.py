"""A graph file as the compiler sees it: the message, where everything stands, and its nodes by name.

``ensemble_scheduling`` of Triton Inference Server becomes a sequence named like the root, so that nothing later tells
the two apart.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft_common.pbtxt import Diagnostic, PbtxtError, Positions, parse
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig
from weft_router.graph.plan import GraphPlan, NodeKind
from weft_router.graph.source import GraphSource

#: Names that stand unquoted in paths and metadata.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_KINDS = {kind.value: kind for kind in NodeKind}


@dataclass(frozen=True, slots=True)
class StepDefinition:
    """One step of a file.

    Attributes:
        name: Given, or made from its case or target; unique within the node unless the file repeats it.
        path: Of the message, for positions.
        message: What the file says.
    """

    name: str
    path: str
    message: pb.Step


@dataclass(frozen=True, slots=True)
class NodeDefinition:
    """One node of a file.

    Attributes:
        name: As in the file.
        path: Of the message, for positions.
        message: What the file says.
        kind: None where the file gives none, or one that this version does not run.
        kind_path: Of the kind's message.
        steps: In declared order.
    """

    name: str
    path: str
    message: pb.Node
    kind: NodeKind | None
    kind_path: str
    steps: tuple[StepDefinition, ...]


@dataclass(frozen=True, slots=True)
class GraphFile:
    """One parsed file.

    Attributes:
        source: What was given.
        name: Of the graph.
        message: What the file says.
        positions: Where.
        is_ensemble: ``platform: "ensemble"``, the rules of Triton Inference Server.
        root: Name of the root node.
        nodes: By name; of two nodes of one name the first.
        all_nodes: In declared order.
    """

    source: GraphSource
    name: str
    message: pb.Graph
    positions: Positions
    is_ensemble: bool
    root: str
    nodes: Mapping[str, NodeDefinition] = field(repr=False)
    all_nodes: Sequence[NodeDefinition] = field(repr=False)

    @property
    def label(self) -> str:
        """``name/version``."""
        return f"{self.name}/{self.source.version}"

    @property
    def is_batched(self) -> bool:
        """Whether tensors have a batch dimension."""
        return self.message.max_batch_size > 0

    def place(self, path: str) -> str:
        """``file:line:column`` of a field, for messages."""
        line, column = self.positions.find(path)
        return f"{self.source.file}:{line}:{column}"


def parse_graph(source: GraphSource) -> GraphFile:
    """The file, read but not checked.

    Raises:
        PbtxtError: It does not parse; every diagnostic has code G001.
    """
    try:
        message, positions = parse(source.text, pb.Graph(), file=source.file)
    except PbtxtError as error:
        raise PbtxtError([replace(found, code="G001") for found in error.diagnostics]) from None
    if not message.ListFields():
        raise PbtxtError([Diagnostic(source.file, 0, 0, "the file is empty; a graph has at least one node", "G001")])
    has_scheduling = message.HasField("ensemble_scheduling")
    root = message.root or "root"
    nodes = [_node(node, f"node[{i}]") for i, node in enumerate(message.node)]
    if has_scheduling:
        nodes.insert(0, _scheduling(message, root))
    return GraphFile(
        source=source,
        name=source.name or message.name,
        message=message,
        positions=positions,
        is_ensemble=message.platform == "ensemble" or (not message.platform and has_scheduling),
        root=root,
        nodes={node.name: node for node in reversed(nodes)},
        all_nodes=nodes,
    )


def model_config(source: GraphSource, plan: GraphPlan) -> ModelConfig:
    """The graph as ``ModelConfig`` shows it: Weft's own fields left out, name and inferred outputs filled in.

    Args:
        source: The file that ``plan`` was compiled from.
        plan: Its plan.
    """
    config = ModelConfig.FromString(parse_graph(source).message.SerializeToString())
    config.DiscardUnknownFields()
    config.name = plan.signature.name
    config.platform = plan.signature.platform
    if not config.output:
        for spec in plan.signature.outputs:
            data_type = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
            config.output.add(name=spec.name, data_type=data_type, dims=spec.dims)
    return config


def _node(node: pb.Node, path: str) -> NodeDefinition:
    kind = node.WhichOneof("kind") or ""
    steps = getattr(node, kind).step if kind else ()
    kind_path = f"{path}.{kind}" if kind else path
    return NodeDefinition(node.name, path, node, _KINDS.get(kind), kind_path, _steps(steps, kind_path))


def _scheduling(message: pb.Graph, root: str) -> NodeDefinition:
    steps = message.ensemble_scheduling.step
    node = pb.Node(name=root, sequence=pb.Sequence(step=steps))
    path = "ensemble_scheduling"
    return NodeDefinition(root, path, node, NodeKind.SEQUENCE, path, _steps(steps, path))


def _steps(steps: Sequence[pb.Step], path: str) -> tuple[StepDefinition, ...]:
    """Steps with their names; a name that was not given and is taken gets a number."""
    taken = Counter(step.name for step in steps if step.name)
    definitions = []
    for i, step in enumerate(steps):
        name = step.name
        if not name:
            given = step.case[0] if step.case and NAME.fullmatch(step.case[0]) else ""
            base = name = given or step.model_name or step.node or step.graph or f"step{i}"
            while taken[name]:
                taken[base] += 1
                name = f"{base}-{taken[base]}"
            taken[name] += 1
        definitions.append(StepDefinition(name, f"{path}.step[{i}]", step))
    return tuple(definitions)
