"""Writes a message as protobuf text format, as a person would: fields in reading order, short messages on one line."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Any, NamedTuple, cast

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from weft.base.text.pbtxt_scan import is_map

WIDTH = 120
_INDENT = "  "
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
    writer = _Writer(comments or {})
    head = [f"# {line}".rstrip() for line in writer.comments.get("", ())]
    return "".join(f"{line}\n" for line in (*head, *writer.body(message, "", "", "")))


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


class _Writer:
    def __init__(self, comments: Mapping[str, Sequence[str]]) -> None:
        self.comments = comments

    def body(self, message: Message, path: str, indent: str, around: str) -> Iterator[str]:
        for item in _items(message, path, around):
            yield from self._comment(item.path, indent)
            name, first = item.field.name, item.values[0]
            if not isinstance(first, Message):
                yield from self._wrapped(item.text, indent)
            elif len(item.values) == 1 and self._fits(item, indent):
                yield f"{indent}{item.text}"
            elif not _is_list(item.field):
                yield f"{indent}{name} {{"
                yield from self.body(first, item.path, indent + _INDENT, item.field.full_name)
                yield f"{indent}}}"
            else:
                yield f"{indent}{name} ["
                yield from self._entries(item, indent + _INDENT)
                yield f"{indent}]"

    def _entries(self, item: _Item, indent: str) -> Iterator[str]:
        for index, value in enumerate(item.values):
            path = f"{item.path}[{index}]"
            comma = "," if index + 1 < len(item.values) else ""
            entry = item._replace(text=_braced(one_line(value)), path=path, values=[value])
            yield from self._comment(path, indent)
            if self._fits(entry, indent):
                yield f"{indent}{entry.text}{comma}"
                continue
            yield f"{indent}{{"
            yield from self.body(value, path, indent + _INDENT, item.field.full_name)
            yield f"{indent}}}{comma}"

    def _fits(self, item: _Item, indent: str) -> bool:
        inner: Any = item.field.message_type
        has_steps = not {"step", "sequence"}.isdisjoint(inner.fields_by_name)
        if (has_steps and item.values[0].ListFields()) or len(indent) + len(item.text) > WIDTH - _is_list(item.field):
            return False
        return not any(path.startswith((f"{item.path}.", f"{item.path}[")) for path in self.comments)

    def _comment(self, path: str, indent: str) -> Iterator[str]:
        yield from (f"{indent}# {line}".rstrip() for line in self.comments.get(path, ()))

    def _wrapped(self, text: str, indent: str) -> Iterator[str]:
        if len(indent) + len(text) <= WIDTH or text[-1] != "]" or '"' in text or "'" in text:
            yield f"{indent}{text}"
        else:
            yield from textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + _INDENT)


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
