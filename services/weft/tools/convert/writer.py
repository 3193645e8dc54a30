"""A draft as the text of a graph file, written as a person would."""

import re
import textwrap
from collections.abc import Iterable, Iterator

from weft.language.compiler.nodes import NodeKind
from weft.tools.convert.draft import CHECK, Draft, DraftCombine, DraftNode, DraftStep, Tensors

_WIDTH = 120
_INDENT = "  "
_TEMPLATE = """\
# max_batch_size: 8
# input [ { name: "..." data_type: TYPE_FP32 dims: [ -1 ] } ]
# output [ { name: "..." data_type: TYPE_FP32 dims: [ -1 ] } ]"""


def write(draft: Draft, origin: str) -> str:
    """The file.

    Args:
        draft: The graph.
        origin: Its source, for the first line.
    """
    lines = [*_comment([f"Converted from {origin}."], ""), *_comment(draft.remarks, "")]
    lines += [f"name: {quoted(draft.name)}", 'platform: "graph"']
    if draft.inputs is None or draft.outputs is None:
        lines.append(_TEMPLATE)
    else:
        is_batched = draft.max_batch_size > 0
        if is_batched:
            lines.append(f"max_batch_size: {draft.max_batch_size}")
        lines += _tensors("input", draft.inputs, is_batched=is_batched)
        lines += _tensors("output", draft.outputs, is_batched=is_batched)
    if draft.timeout_ms:
        lines.append(f"policy {{ timeout_ms: {draft.timeout_ms} }}")
    for node in draft.nodes.values():
        lines += _node(node)
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """A string of the text format; in single quotes where that saves escapes."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    escaped = re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\{ord(found[0]):03o}", escaped)
    if '"' in escaped and "'" not in escaped:
        return f"'{escaped}'"
    return '"' + escaped.replace('"', '\\"') + '"'


def _comment(remarks: Iterable[str], indent: str) -> Iterator[str]:
    """Remarks as comments; a quotation stays on its line."""
    for remark in remarks:
        line = " ".join("".join(c if c.isprintable() else " " for c in remark).split())
        body = line.removeprefix(CHECK)
        is_check = line.startswith(CHECK)
        text = CHECK + body if is_check else body[:1].upper() + body[1:]
        if not text.endswith((".", ":", "?")):
            text += "."
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
        yield from _message("step", _step_fields(step, node.kind), inner)
    yield from (f"{inner}answer_after: {quoted(step.name)}" for step in node.steps if step.is_guard)
    if node.loop:
        yield from _message("loop", node.loop, inner)
    for combine in node.combines:
        yield from _comment(combine.remarks, inner)
        yield from _message("combine", _combine_fields(combine), inner)
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


def _step_fields(step: DraftStep, kind: NodeKind) -> list[str]:
    fields = [f"name: {quoted(step.name)}"]
    if step.weight is not None:
        fields.append(f"weight: {step.weight:.15g}")
    fields += [f"case: {quoted(case)}" for case in step.cases]
    if kind.chooses_by_when and step.when:
        fields.append(f"when: {quoted(step.when)}")
    if step.is_otherwise:
        fields.append("otherwise: true")
    fields += _target_fields(step)
    fields += [f"after: {quoted(name)}" for name in step.after]
    if not kind.chooses_by_when and step.when:
        fields.append(f"when: {quoted(step.when)}")
    if step.accept:
        fields.append(f"accept: {quoted(step.accept)}")
    if step.is_soft:
        fields.append("dependency: SOFT")
    if step.shadow_percent:
        fields.append(f"shadow {{ percent: {step.shadow_percent:.15g} }}")
    if step.timeout_ms:
        fields.append(f"policy {{ timeout_ms: {step.timeout_ms} }}")
    return fields


def _target_fields(step: DraftStep) -> list[str]:
    targets = (("node", step.node), ("graph", step.graph), ("model_name", step.model))
    fields = [f"{field}: {quoted(name)}" for field, name in targets if name]
    for name, entries in (("input_map", step.input_map), ("output_map", step.output_map)):
        fields += [f"{name} {{ key: {quoted(key)} value: {quoted(value)} }}" for key, value in entries.items()]
    return fields


def _combine_fields(combine: DraftCombine) -> list[str]:
    fields = [f"output: {quoted(combine.output)}", f"method: {combine.method}"]
    if combine.source and combine.source != combine.output:
        fields.append(f"from: {quoted(combine.source)}")
    if combine.custom is not None:
        fields.append(f"custom {{ {' '.join(_target_fields(combine.custom))} }}")
    return fields
