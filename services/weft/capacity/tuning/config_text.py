"""Edits single fields in the text of a ``config.pbtxt``; every other character stays."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf import text_format
from google.protobuf.message import Message

from weft.base.errors import InternalError, UnsupportedError
from weft.base.text.pbtxt import parse
from weft.base.text.pbtxt_outline import GivenField, Outline
from weft.base.text.pbtxt_writer import quoted
from weft_protos.model_config_pb2 import ModelConfig

_PARAMETERS = "parameters"


class Edit(NamedTuple):
    """A change of a field.

    Attributes:
        path: Names of fields from the top, for example ``("dynamic_batching", "max_queue_delay_microseconds")``; of a
            parameter ``("parameters", KEY)``. Messages on the way must not be repeated.
        value: In protobuf text format, for example ``500``, ``[ 4, 8 ]`` or ``{ }``; of a parameter the plain text.
            None: remove the field.
    """

    path: tuple[str, ...]
    value: str | None


def edited(text: str, edits: Sequence[Edit], *, file: str) -> str:
    """Change fields in the text of a ``config.pbtxt``, one after another; ``file`` is its name for messages.

    Raises:
        PbtxtError: The text is not a configuration.
        UnsupportedError: A message on the way to a field is repeated.
    """
    expected, _ = parse(text, ModelConfig(), file=file)
    for edit in edits:
        text = _with_parameter(text, edit) if edit.path[0] == _PARAMETERS else _with_field(text, edit, file)
        _apply(expected, edit.path, edit.value)
    got, _ = parse(text, ModelConfig(), file=file)
    if got != expected:
        raise InternalError(f"'{file}' would not say what it should after {edits}; change it by hand")
    return text


def with_head(text: str, marker: str, line: str) -> str:
    """Put a comment at the top of the text, replacing earlier ones with the same marker."""
    kept = text.removeprefix("\ufeff").splitlines(keepends=True)
    while kept and kept[0].startswith(f"# {marker}"):
        kept.pop(0)
    return "".join([f"# {marker}{line}\n", *kept])


def _apply(message: Any, path: Sequence[str], value: str | None) -> None:
    """Apply the same change to a parsed message, to check the change of the text."""
    name, *rest = path
    if name == _PARAMETERS:
        if value is not None:
            message.parameters[rest[0]].string_value = value
        elif rest[0] in message.parameters:
            del message.parameters[rest[0]]
        return
    if not rest:
        message.ClearField(name)
        if value is not None:
            text_format.Merge(f"{name}: {value}", message)
        return
    inner = getattr(message, name)
    if not isinstance(inner, Message):  # a repeated field
        inner = inner[0] if inner else inner.add() if value is not None else None
    if inner is not None:
        if value is not None:
            inner.SetInParent()
        _apply(inner, rest, value)


def _with_field(text: str, edit: Edit, file: str) -> str:
    fields, inside = _parsed(text), None
    *around, name = edit.path
    for depth, outer in enumerate(around):
        messages = [block for field in fields if field.name.text == outer for block in field.blocks]
        if len(messages) > 1:
            raise UnsupportedError(f"'{file}' has {len(messages)} of '{outer}'; change them by hand")
        if not messages:
            return text if edit.value is None else _appended(text, edit.path[depth:], edit.value)
        inside = messages[0]
        fields = inside.given
    present = [field for field in fields if field.name.text == name]
    for field in reversed(present[1:] if edit.value is not None else present):
        text = _without(text, field)
    if edit.value is None:
        return text
    if present:
        first = present[0]
        return text[: first.value] + edit.value + text[first.end :]
    if inside is None:
        return _appended(text, (name,), edit.value)
    written = _written(name, edit.value)
    content = text[inside.start : inside.end]
    if "\n" not in content:
        rest = f" {content.strip()}" if content.strip() else ""
        return text[: inside.start] + f" {written}{rest} " + text[inside.end :]
    indent = re.search(r"\r?\n[ \t]*(?=\S)", content)
    return text[: inside.start] + (indent[0] if indent else "\n  ") + written + text[inside.start :]


def _with_parameter(text: str, edit: Edit) -> str:
    key = edit.path[1]
    entries = [(field, block) for field in _parsed(text) if field.name.text == _PARAMETERS for block in field.blocks]
    for field, entry in reversed(entries):
        inner = {one.name.text: one for one in entry.given}
        if "key" not in inner or _unquoted(text[inner["key"].value : inner["key"].end]) != key:
            continue
        if edit.value is None:
            if len(field.blocks) == 1:
                return _without(text, field)
            rest = text[entry.end + 1 :]
            comma = re.match(r"\s*,", rest)
            before = text[: entry.start - 1]
            before = before if comma else before.rstrip().removesuffix(",")
            return before + rest[comma.end() if comma else 0 :]
        written = f"{{ string_value: {quoted(edit.value)} }}"
        if "value" not in inner:
            return text[: entry.end] + f"value {written} " + text[entry.end :]
        place = inner["value"]
        for one in (one for block in place.blocks for one in block.given):
            if one.name.text == "string_value":
                place, written = one, quoted(edit.value)
        return text[: place.value] + written + text[place.end :]
    if edit.value is None:
        return text
    return _appended(text, (_PARAMETERS,), f"{{ key: {quoted(key)} value {{ string_value: {quoted(edit.value)} }} }}")


def _appended(text: str, path: Sequence[str], value: str) -> str:
    for name in reversed(path[1:]):
        value = f"{{ {_written(name, value)} }}"
    ended = text if not text or text.endswith("\n") else f"{text}\n"
    return f"{ended}{_written(path[0], value)}\n"


def _written(name: str, value: str) -> str:
    return f"{name} {value}" if value.startswith("{") else f"{name}: {value}"


def _unquoted(literal: str) -> str:
    return text_format.Parse(f"name: {literal}", ModelConfig()).name


def _without(text: str, field: GivenField) -> str:
    """Remove a field from the text, with its comma, and with its line if otherwise empty."""
    end = field.end
    if separator := re.match(r"[ \t]*[,;]", text[end:]):
        end += separator.end()
    start = len(text[: field.name.offset].rstrip(" \t"))
    line_end = re.match(r"[ \t]*\r?\n", text[end:])
    if line_end and (start == 0 or text[start - 1] == "\n"):
        return text[:start] + text[end + line_end.end() :]
    return text[:start] + text[end:]


def _parsed(text: str) -> list[GivenField]:
    return Outline(text, ModelConfig()).blocks[0].given
