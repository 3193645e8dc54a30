"""A graph during conversion, with remarks, and its output as readable text."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from weft.language.compiler.nodes import NodeKind
from weft.language.syntax.parse import NAME
from weft.language.types.signatures import TensorType
from weft.tools.convert.yaml_tree import Source, YamlValue

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
    bandit: str = ""
    combiner: DraftStep | str | None = None
    loop: list[str] = field(default_factory=list)
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


_WIDTH = 120
_INDENT = "  "
_TEMPLATE = """\
# max_batch_size: 8
# input [ { name: "..." data_type: TYPE_FP32 dims: [ -1 ] } ]
# output [ { name: "..." data_type: TYPE_FP32 dims: [ -1 ] } ]"""


def write(draft: Draft, origin: str) -> str:
    """Write the graph as text; the first line names its ``origin``."""
    lines = [*_comment([f"Converted from {origin}."], ""), *_comment(draft.remarks, "")]
    lines += [f"name: {quoted(draft.name)}", 'platform: "graph"']
    if draft.inputs is None or draft.outputs is None:
        lines.append(_TEMPLATE)
    else:
        if draft.max_batch_size > 0:
            lines.append(f"max_batch_size: {draft.max_batch_size}")
        for what, tensors in (("input", draft.inputs), ("output", draft.outputs)):
            lines += _tensors(what, tensors, is_batched=draft.max_batch_size > 0)
    if draft.timeout_ms:
        lines.append(f"policy {{ timeout_ms: {draft.timeout_ms} }}")
    for node in draft.nodes.values():
        lines += _node(node)
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """Quote a string for text format, in single quotes if that saves escapes."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    escaped = re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\{ord(found[0]):03o}", escaped)
    if '"' in escaped and "'" not in escaped:
        return f"'{escaped}'"
    return '"' + escaped.replace('"', '\\"') + '"'


def _comment(remarks: Iterable[str], indent: str) -> Iterator[str]:
    """Remarks as comments; a quotation stays on its line."""
    for remark in remarks:
        text = " ".join("".join(c if c.isprintable() else " " for c in remark).split())
        is_check = text.startswith(CHECK)
        text = text if is_check else text[:1].upper() + text[1:]
        text += "" if text.endswith((".", ":", "?")) else "."
        first, more = f"{indent}# ", f"{indent}# {' ' * len(CHECK) if is_check else ''}"
        yield from textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=more, break_on_hyphens=False)


def _tensors(what: str, tensors: Tensors, *, is_batched: bool) -> Iterator[str]:
    entries = []
    for name, tensor in tensors.items():
        data_type = "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
        dims = ", ".join(map(str, tensor.dims if is_batched else tensor.full_dims))
        optional = " optional: true" if tensor.is_optional else ""
        entries.append(f"{{ name: {quoted(name)} data_type: {data_type} dims: [ {dims} ]{optional} }}")
    if len(entries) == 1:
        yield f"{what} [ {entries[0]} ]"
    elif entries:
        yield f"{what} ["
        yield from (f"{_INDENT}{entry}{',' if i < len(entries) else ''}" for i, entry in enumerate(entries, start=1))
        yield "]"


def _node(node: DraftNode) -> Iterator[str]:
    yield from _comment(node.remarks, "")
    yield "node {"
    yield f"{_INDENT}name: {quoted(node.name)}"
    yield f"{_INDENT}{node.kind.name} {{"
    inner = _INDENT * 2
    if node.on:
        yield f"{inner}on: {quoted(node.on)}"
    if node.bandit:
        yield f"{inner}bandit {{ {node.bandit} }}"
    for step in node.steps:
        yield from _comment(step.remarks, inner)
        yield from _message("step", _step_fields(step, chooses_by_when=node.kind.chooses_by_when), inner)
    yield from (f"{inner}answer_after: {quoted(step.name)}" for step in node.steps if step.is_guard)
    if node.loop:
        yield from _message("loop", node.loop, inner)
    for combine in node.combines:
        yield from _comment(combine.remarks, inner)
        fields = [f"output: {quoted(combine.output)}", f"method: {combine.method}"]
        if combine.source and combine.source != combine.output:
            fields.append(f"from: {quoted(combine.source)}")
        if combine.custom is not None:
            fields.append(f"custom {{ {' '.join(_target_fields(combine.custom))} }}")
        yield from _message("combine", fields, inner)
    yield f"{_INDENT}}}"
    yield "}"


def _message(name: str, fields: list[str], indent: str) -> Iterator[str]:
    """A message on one line if it fits, else one field a line."""
    line = f"{indent}{name} {{ {' '.join(fields)} }}"
    if len(line) <= _WIDTH:
        yield line
        return
    yield f"{indent}{name} {{"
    yield from (f"{indent}{_INDENT}{field}" for field in fields)
    yield f"{indent}}}"


def _step_fields(step: DraftStep, *, chooses_by_when: bool) -> list[str]:
    when = [f"when: {quoted(step.when)}"] if step.when else []
    return [
        f"name: {quoted(step.name)}",
        *([] if step.weight is None else [f"weight: {step.weight:.15g}"]),
        *(f"case: {quoted(case)}" for case in step.cases),
        *(when if chooses_by_when else ()),
        *(["otherwise: true"] if step.is_otherwise else ()),
        *_target_fields(step),
        *(f"after: {quoted(name)}" for name in step.after),
        *(() if chooses_by_when else when),
        *([f"accept: {quoted(step.accept)}"] if step.accept else ()),
        *(["dependency: SOFT"] if step.is_soft else ()),
        *([f"shadow {{ percent: {step.shadow_percent:.15g} }}"] if step.shadow_percent else ()),
        *([f"policy {{ timeout_ms: {step.timeout_ms} }}"] if step.timeout_ms else ()),
    ]


def _target_fields(step: DraftStep) -> list[str]:
    targets = (("node", step.node), ("graph", step.graph), ("model_name", step.model))
    fields = [f"{field}: {quoted(name)}" for field, name in targets if name]
    for name, entries in (("input_map", step.input_map), ("output_map", step.output_map)):
        fields += [f"{name} {{ key: {quoted(key)} value: {quoted(value)} }}" for key, value in entries.items()]
    return fields
