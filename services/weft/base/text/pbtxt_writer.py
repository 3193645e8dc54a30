"""Writes a message as protobuf text format, as a person would: fields in reading order, short messages on one line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Any, NamedTuple, cast

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


class _Item(NamedTuple):
    """A field, or one value of a repeated one. ``text`` is the whole of it on one line."""

    text: str
    path: str
    field: FieldDescriptor
    values: Sequence[Any]


def text_of(message: Message, comments: Mapping[str, Sequence[str]] | None = None) -> str:
    """Write a message as the text of a file; equal messages have equal texts.

    Args:
        comments: Path of a field as in ``Positions`` -> lines above it; "" has those at the head of the file.
    """
    comments = comments or {}
    return format_pbtxt("\n".join((*_commented(comments, ""), *_lines(message, "", "", comments))))


def one_line(message: Message) -> str:
    """Write the fields of a message on one line."""
    return " ".join(item.text for item in _items(message, "", ""))


def quoted(text: str, *, is_condition: bool = False) -> str:
    """Quote a string for text format, in single quotes if that saves escapes or it is a condition."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    escaped = re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\{ord(found[0]):03o}", escaped)
    if (is_condition or '"' in escaped) and "'" not in escaped:
        return f"'{escaped}'"
    return '"' + escaped.replace('"', '\\"') + '"'


def _lines(message: Message, path: str, around: str, comments: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The fields, each on a line but for lists and those that have steps or comments in them."""
    for item in _items(message, path, around):
        yield from _commented(comments, item.path)
        name, values = item.field.name, item.values
        is_long = any(map(_has_steps, values)) or (_is_list(item.field) and len(values) > 1)
        if not is_long and not any(one.startswith((f"{item.path}.", f"{item.path}[")) for one in comments):
            yield item.text
        elif not _is_list(item.field):
            yield from (f"{name} {{", *_lines(values[0], item.path, item.field.full_name, comments), "}")
        else:
            yield f"{name} ["
            for index, value in enumerate(values):
                own, comma = f"{item.path}[{index}]", "," if index + 1 < len(values) else ""
                yield from _commented(comments, own)
                if _has_steps(value) or any(one.startswith(f"{own}.") for one in comments):
                    yield from ("{", *_lines(value, own, item.field.full_name, comments), f"}}{comma}")
                else:
                    yield _braced(one_line(value)) + comma
            yield "]"


def _commented(comments: Mapping[str, Sequence[str]], path: str) -> Iterator[str]:
    yield from (f"# {line}".rstrip() for line in comments.get(path, ()))


def _has_steps(value: Any) -> bool:
    return (
        isinstance(value, Message)
        and bool(value.ListFields())
        and not _STEPS.isdisjoint(value.DESCRIPTOR.fields_by_name)
    )


def _items(message: Message, path: str, around: str) -> Iterator[_Item]:
    """The fields that are given, in reading order."""
    descriptor = cast(Descriptor, message.DESCRIPTOR)
    order = (*_ORDER.get(around, ()), *_ORDER.get(descriptor.full_name, ()))
    given = {field.name: (field, value) for field, value in message.ListFields()}
    for name in dict.fromkeys([*(name for name in order if name in given), *given]):
        field, value = given[name]
        own = f"{path}.{name}" if path else name
        if is_map(field):
            make = value.GetEntryClass()
            for key in sorted(value):
                entry = make(key=key, value=value[key])
                yield _Item(_written(field, entry), f"{own}[{key}]", field, [entry])
        elif not field.is_repeated:
            yield _Item(_written(field, value), own, field, [value])
        elif field.message_type is None:
            text = ", ".join(scalar(field, one) for one in value)
            text = text if len(value) == 1 and name not in _NUMBERS else f"[ {text} ]"
            yield _Item(f"{name}: {text}", own, field, value)
        elif _is_list(field):
            text = f"{name} [ {', '.join(_braced(one_line(one)) for one in value)} ]"
            yield _Item(text, own, field, value)
        else:
            for index, one in enumerate(value):
                yield _Item(_written(field, one), f"{own}[{index}]", field, [one])


def _is_list(field: FieldDescriptor) -> bool:
    return field.name in _LISTS or field.full_name == "weft.graph.Ensembling.step"


def _written(field: FieldDescriptor, value: Any) -> str:
    if not isinstance(value, Message):
        return f"{field.name}: {scalar(field, value)}"
    return f"{field.name} {_braced(' '.join(item.text for item in _items(value, '', field.full_name)))}"


def _braced(text: str) -> str:
    return f"{{ {text} }}" if text else "{ }"


def scalar(field: FieldDescriptor, value: Any) -> str:
    """Write a value that is no message: text in quotes, enums by name, numbers as short as they are exact."""
    if isinstance(value, str):
        return quoted(value, is_condition=field.full_name in CONDITIONS)
    out = StringIO()
    text_format.PrintFieldValue(field, value, out)
    return out.getvalue().removesuffix(".0")
