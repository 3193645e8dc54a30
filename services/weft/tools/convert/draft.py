"""A graph during conversion, with remarks, and its output as readable text."""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.base.text.pbtxt_format import WIDTH
from weft.base.text.pbtxt_writer import text_of
from weft.language.compiler.nodes import NodeKind
from weft.language.syntax.parse import NAME
from weft.language.types.signatures import TensorType
from weft.tools.convert.yaml_tree import Source, YamlValue
from weft_protos import graph_pb2 as pb

#: Begins a remark on what a person has to decide.
CHECK = "CHECK: "
#: Begins, behind it, a remark on what was left out though it changes answers.
DIFFERS = "answers may differ: "
#: Among what a step reads: the inputs of its node.
NODE_INPUT = -1

Tensors = Mapping[str, TensorType]


@dataclass(slots=True)
class DraftCondition:
    """A condition of KServe in gjson; on the client's request if ``is_request``, else on a model's answer."""

    text: str
    value: YamlValue
    is_request: bool


@dataclass(slots=True)
class DraftStep:
    """One step; exactly one of ``model``, ``node`` and ``graph`` is given.

    Attributes:
        reads: Sequence: sources of inputs, steps by index or ``NODE_INPUT``; the first that has an input gives it.
        proceed: Sequence: runs if it holds. Switch: chosen if it holds.
        needs: Sequence: a step without whose answer it does not run.
        stop: Cascade: continue with the next step if it holds.
        shadow_percent: Above 0: a shadow.
        is_guard: Sequence: must end before the node answers, though nothing of it is read.
        after: Sequence: steps that must answer first, though nothing of them is read.
    """

    name: str
    value: YamlValue
    model: str = ""
    node: str = ""
    graph: str = ""
    reads: tuple[int, ...] = (NODE_INPUT,)
    weight: float | None = None
    proceed: DraftCondition | None = None
    needs: int | None = None
    stop: DraftCondition | None = None
    when: str = ""
    accept: str = ""
    cases: tuple[str, ...] = ()
    is_otherwise: bool = False
    is_soft: bool = False
    is_guard: bool = False
    shadow_percent: float = 0.0
    timeout_ms: int = 0
    input_map: dict[str, str] = field(default_factory=dict)
    output_map: dict[str, str] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DraftCombine:
    """One output of an ensemble."""

    output: str
    method: str
    source: str = ""
    custom: DraftStep | None = None
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DraftNode:
    """One node.

    Attributes:
        on: Of a switch of Seldon.
        reads_one_row: Whether a condition reads a tensor of which it takes one row.
        routed_by: Switch of Seldon: the model whose answer ``on`` reads.
        bandit, loop: The fields of these.
        answers: Sequence: steps before the last one whose outputs are the node's as well.
        combiner: Ensemble of Seldon: the model that combines, or "AVERAGE"; None: outputs are keyed by step.
    """

    name: str
    kind: NodeKind
    value: YamlValue
    steps: list[DraftStep] = field(default_factory=list)
    on: str = ""
    reads_one_row: bool = False
    routed_by: DraftStep | None = None
    bandit: pb.Bandit | None = None
    combiner: DraftStep | str | None = None
    loop: pb.Loop | None = None
    answers: list[int] = field(default_factory=list)
    combines: list[DraftCombine] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Draft:
    """A whole graph; the node "root" answers. Inputs and outputs are None if unknown."""

    name: str
    value: YamlValue
    nodes: dict[str, DraftNode] = field(default_factory=dict)
    inputs: Tensors | None = None
    outputs: Tensors | None = None
    max_batch_size: int = 0
    timeout_ms: int = 0
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def named(cls, source: Source, document: YamlValue, name: str) -> "Draft":
        """A graph without nodes, with that name or the nearest legal one."""
        draft = cls("", document)
        metadata = document.entries.get("metadata", document)
        draft.name = legal_name(source, metadata.entries.get("name", document), name, (), draft.remarks)
        return draft


def check(source: Source, value: YamlValue, remarks: list[str], text: str) -> None:
    """Add a question to the output, and a warning at its place in the source."""
    remarks.append(CHECK + text)
    source.warning(value, text)


def differs(source: Source, value: YamlValue, remarks: list[str], text: str) -> None:
    """Report an omission that changes answers: in the output, and as a warning at its place in the source."""
    check(source, value, remarks, DIFFERS + text)


def legal_name(source: Source, value: YamlValue, given: str, taken: Iterable[str], remarks: list[str]) -> str:
    """Make ``given`` a legal, unused name; remark on a change."""
    name = "".join(character if NAME.fullmatch("a" + character) else "_" for character in given)
    name = name if NAME.fullmatch(name) else f"n{name}"
    base, number, others = name, 1, set(taken)
    while name in others:
        number += 1
        name = f"{base}-{number}"
    if name != given:
        why = "that name is taken" if base == given else "names are letters, digits, '_', '-', '.' and ':'"
        text = f"'{given}' is called '{name}' here: {why}"
        remarks.append(text)
        source.warning(value, text)
    return name


#: Stands where the inputs and outputs are not known.
_TEMPLATE = (
    "max_batch_size: 8",
    'input [ { name: "..." data_type: TYPE_FP32 dims: [ -1 ] } ]',
    'output [ { name: "..." data_type: TYPE_FP32 dims: [ -1 ] } ]',
)


def write(draft: Draft, origin: str) -> str:
    """Write the graph as text; the first line names its ``origin``."""
    graph = pb.Graph(name=draft.name, platform="graph")
    comments = {"": _comment([f"Converted from {origin}.", *draft.remarks])}
    if draft.inputs is not None and draft.outputs is not None:
        graph.max_batch_size = draft.max_batch_size
        for field, tensors in ((graph.input, draft.inputs), (graph.output, draft.outputs)):
            for name, tensor in tensors.items():
                data_type = "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
                dims = tensor.dims if draft.max_batch_size > 0 else tensor.full_dims
                field.add(name=name, data_type=data_type, dims=dims, optional=tensor.is_optional or None)
    if draft.timeout_ms:
        graph.policy.timeout_ms = draft.timeout_ms
    for index, node in enumerate(draft.nodes.values()):
        comments[f"node[{index}]"] = _comment(node.remarks)
        _add_node(graph, node, f"node[{index}].{node.kind.name}", comments)
    if draft.inputs is None or draft.outputs is None:
        first = "policy" if draft.timeout_ms else "node[0]"
        comments[first] = [*_TEMPLATE, *comments.get(first, ())]
    return text_of(graph, {path: lines for path, lines in comments.items() if lines})


def _comment(remarks: Iterable[str], indent: int = 0) -> list[str]:
    """Remarks as lines of a comment; a quotation stays on its line."""
    lines = []
    for remark in remarks:
        text = " ".join("".join(c if c.isprintable() else " " for c in remark).split())
        more = " " * len(CHECK) if text.startswith(CHECK) else ""
        text = text if more else text[:1].upper() + text[1:]
        text += "" if text.endswith((".", ":", "?")) else "."
        width = WIDTH - indent - len("# ")
        lines += textwrap.wrap(text, width, subsequent_indent=more, break_on_hyphens=False)
    return lines


def _add_node(graph: pb.Graph, node: DraftNode, path: str, comments: dict[str, list[str]]) -> None:
    kind: Any = getattr(graph.node.add(name=node.name), node.kind.name)
    kind.SetInParent()
    if node.on:
        kind.on = node.on
    if node.bandit is not None:
        kind.bandit.CopyFrom(node.bandit)
    if node.loop is not None:
        kind.loop.CopyFrom(node.loop)
    for index, step in enumerate(node.steps):
        comments[f"{path}.step[{index}]"] = _comment(step.remarks, indent=4)
        kind.step.append(_step(step))
    if guards := [step.name for step in node.steps if step.is_guard]:
        kind.answer_after.extend(guards)
    for index, combine in enumerate(node.combines):
        comments[f"{path}.combine[{index}]"] = _comment(combine.remarks, indent=4)
        source = {} if combine.source in ("", combine.output) else {"from": combine.source}
        custom = None if combine.custom is None else _call(combine.custom)
        kind.combine.add(output=combine.output, method=combine.method, custom=custom, **source)


def _step(step: DraftStep) -> pb.Step:
    message = _call(step)
    message.MergeFrom(
        pb.Step(
            name=step.name,
            weight=step.weight or None,
            case=step.cases,
            when=step.when,
            otherwise=step.is_otherwise,
            after=step.after,
            accept=step.accept,
            dependency=pb.Step.SOFT if step.is_soft else pb.Step.HARD,
            shadow=pb.Shadow(percent=step.shadow_percent) if step.shadow_percent else None,
            policy=pb.Policy(timeout_ms=step.timeout_ms) if step.timeout_ms else None,
        )
    )
    return message


def _call(step: DraftStep) -> pb.Step:
    return pb.Step(
        model_name=step.model,
        node=step.node,
        graph=step.graph,
        input_map=step.input_map,
        output_map=step.output_map,
    )
