"""Writes a message as protobuf text format, as a person would: fields in reading order, short messages on one line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Any, cast

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from weft.base.text.pbtxt_format import format_pbtxt
from weft.base.text.pbtxt_scan import is_map

#: Fields of messages that never stand on one line.
_STEPS = frozenset({"step", "sequence"})
#: Message, or the field that holds it -> fields that come first; the others follow by number.
_ORDER: Mapping[str, Sequence[str]] = {
    "inference.ModelConfig": (
        *("name", "platform", "backend", "default_model_filename", "max_batch_size", "model_transaction_policy"),
        *("input", "output", "parameters", "instance_group"),
    ),
    "inference.ModelInstanceGroup": ("name", "count", "kind"),
    "weft.graph.Graph": (
        *("name", "platform", "version_policy", "max_batch_size", "input", "output", "parameters"),
        *("policy", "import", "root", "node"),
    ),
    "weft.graph.Sequence": ("ordered", "max_inflight_responses", "loop"),
    "weft.graph.Switch": ("on", "per_row"),
    "weft.graph.Splitter": ("sticky_by", "salt", "bandit"),
    "weft.graph.Ensemble": ("step", "quorum", "straggler_ms"),
    "weft.graph.Cascade": ("per_row",),
    "weft.graph.Map": ("over", "lengths", "max_rows", "max_inflight", "max_batch_size", "index", "step"),
    "weft.graph.Collector": ("by", "count", "join", "max_bytes"),
    "weft.graph.Combine": ("output", "from", "method"),
    "weft.graph.Switch.step": ("name", "case", "when", "otherwise"),
    "weft.graph.Splitter.step": ("name", "weight"),
    "weft.graph.Step": (
        *("name", "model_name", "model_version", "node", "graph", "input_map", "output_map", "constant", "weight"),
        *("after", "when", "accept", "dependency", "default", "policy", "fallback", "shadow"),
    ),
}
#: Repeated fields of messages that are written as a list: ``input [ { ... } ]``.
_LISTS = frozenset({"input", "output", "instance_group", "model_warmup"})
#: Strings with a condition, which has quotes of its own more often than not.
CONDITIONS = frozenset(
    f"weft.graph.{name}"
    for name in ("Step.when", "Step.accept", "Loop.while", "Switch.on", "Splitter.sticky_by", "Cache.key")
)
#: Repeated numbers that are written as a list even if there is one.
_NUMBERS = frozenset({"dims", "shape", "gpus"})


def text_of(message: Message, comments: Mapping[str, Sequence[str]] | None = None) -> str:
    """Write a message as the text of a file; equal messages have equal texts.

    Args:
        comments: Path of a field as in ``Positions`` -> lines above it; "" has those at the head of the file.
    """
    comments = comments or {}
    text = " ".join((_above(comments, ""), *_fields(message, "", "", comments, "\n")))
    return format_pbtxt(re.sub(r"\n\s*\n", "\n", text))


def one_line(message: Message) -> str:
    """Write the fields of a message on one line."""
    return " ".join(_fields(message, "", "", {}, ""))


def quoted(text: str, *, is_condition: bool = False) -> str:
    """Quote a string for text format, in single quotes if that saves escapes or it is a condition."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    escaped = re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\{ord(found[0]):03o}", escaped)
    if (is_condition or '"' in escaped) and "'" not in escaped:
        return f"'{escaped}'"
    return '"' + escaped.replace('"', '\\"') + '"'


def _above(comments: Mapping[str, Sequence[str]], path: str) -> str:
    return "".join(f"\n# {line}\n" for line in comments.get(path, ()))


def _fields(
    message: Message, path: str, around: str, comments: Mapping[str, Sequence[str]], line_break: str
) -> Iterator[str]:
    """The fields that are given, in reading order; ``line_break`` is where ``format_pbtxt`` shall make lines."""
    descriptor = cast(Descriptor, message.DESCRIPTOR)
    order = (*_ORDER.get(around, ()), *_ORDER.get(descriptor.full_name, ()))
    given = {field.name: (field, value) for field, value in message.ListFields()}
    for name in dict.fromkeys([*(name for name in order if name in given), *given]):
        field, value = given[name]
        own = f"{path}.{name}" if path else name
        if own in comments:
            yield _above(comments, own)
        if field.message_type is None:
            text = ", ".join(scalar(field, one) for one in (value if field.is_repeated else [value]))
            is_listed = field.is_repeated and (len(value) > 1 or name in _NUMBERS)
            yield f"{name}: " + (f"[ {text} ]" if is_listed else text)
            continue
        values = {own: value}
        if is_map(field):
            values = {f"{own}[{key}]": value.GetEntryClass()(key=key, value=value[key]) for key in sorted(value)}
        elif field.is_repeated:
            values = {f"{own}[{index}]": one for index, one in enumerate(value)}
        is_list = field.is_repeated and (name in _LISTS or field.full_name == "weft.graph.Ensembling.step")
        opening = "{" if _STEPS.isdisjoint(field.message_type.fields_by_name) else "{" + line_break
        texts = []
        for place, one in values.items():
            inner = _fields(one, place, field.full_name, comments, line_break)
            above = _above(comments, place) if field.is_repeated else ""
            texts.append(above + name * (not is_list) + " ".join((f" {opening}", *inner, "}")))
        if is_list:
            text = ",".join(texts)
            is_long = len(values) > 1 or "\n" in text
            yield f"{name} [{line_break if is_long else ''}{text} ]"
        else:
            yield from texts


def scalar(field: FieldDescriptor, value: Any) -> str:
    """Write a value that is no message: text in quotes, enums by name, numbers as short as they are exact."""
    if isinstance(value, str):
        return quoted(value, is_condition=field.full_name in CONDITIONS)
    out = StringIO()
    text_format.PrintFieldValue(field, value, out)
    return out.getvalue().removesuffix(".0")
