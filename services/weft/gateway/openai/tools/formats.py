"""``ToolFormat``: how a family of models writes tool calls; and calls that are JSON objects, which most write."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

from weft.base.errors import InternalError
from weft.base.text.suggestion import suggestion
from weft.gateway.json_text import is_encodable
from weft.gateway.openai.tools.incoming import Arguments, IncomingText, NotACallError, Parsing, is_name

#: JSON schemas of the parameters, by names of functions. Empty: the functions are unknown, and any name is taken.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]

Value = TypeVar("Value")

_ARGUMENTS = ("arguments", "parameters")


def call_id() -> str:
    """An id for a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def named_in(table: Mapping[str, Value], named: str, model: str, parameter: str) -> Value:
    """What a model's parameter names. Raises InternalError: it is wrong; clients are not told."""
    if named not in table:
        raise InternalError(
            f"the model '{model}' has the parameter '{parameter}' {named!r}{suggestion(named, table)}; use one of "
            f"{', '.join(table)}"
        )
    return table[named]


class ForcedCalls(NamedTuple):
    """How calls that a grammar forces are written: JSON objects with ``name`` and ``key``.

    Attributes:
        opening: What the prompt ends with: the start of the first call.
        key: Name of the arguments.
    """

    opening: str
    separator: str
    key: str = _ARGUMENTS[0]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        name: Value of the model's parameter ``tool_parser``.
        markers: Texts in chat templates, any of which shows that the model writes so.
        parse: Parses an answer to its end, given the functions.
        forced: How forced calls are written; None: the format is not made of JSON, so as a JSON list.
        around: Without ``forced``: what stands before and behind the name in a call; None: it is not known.
        has_special_tokens: Whether markers are special tokens, which the text has only if they are not skipped.
        make_id: Makes an id that the chat template accepts.
    """

    name: str
    markers: Sequence[str]
    parse: Callable[[IncomingText, Schemas], Parsing[None]]
    forced: ForcedCalls | None = None
    around: tuple[str, str] | None = None
    has_special_tokens: bool = False
    make_id: Callable[[], str] = call_id


def parse_object_call(
    text: IncomingText, schemas: Schemas | None = None, *, needs_arguments: bool = False
) -> Parsing[None]:
    """Parse ``{"name": ..., "arguments": ...}``; the order is free, and other fields are skipped.

    Arguments that follow the name are yielded as they arrive. ``parameters`` is another name of them; text of JSON is
    decoded. Absent ones are none, unless ``needs_arguments``.
    Raises NotACallError: it is something else, or the function is not among ``schemas``, if there are any.
    """
    name, arguments, is_begun = "", None, False
    yield from text.expect("{")
    while True:
        yield from text.spaces()
        key = yield from _string(text)
        yield from text.spaces()
        yield from text.expect(":")
        yield from text.spaces()
        if key == "name" and not name:
            name = yield from _string(text)
            if not is_name(name) or (schemas and name not in schemas):
                raise NotACallError
        elif key in _ARGUMENTS and name and not is_begun:
            yield from parse_arguments(text, name)
            is_begun = True
        elif key in _ARGUMENTS:
            arguments = yield from _held_arguments(text)
        else:
            yield from _skip(text)
        yield from text.spaces()
        if not (yield from text.takes(",")):
            break
    yield from text.expect("}")
    if not is_begun:
        if not name or (needs_arguments and arguments is None):
            raise NotACallError
        yield from text.begin_call(name)
        yield Arguments("{}" if arguments is None else arguments)
    text.end_call()


def parse_arguments(text: IncomingText, name: str) -> Parsing[None]:
    """Begin a call, and yield its arguments as they arrive. Raises NotACallError if they do not look like any."""
    if (yield from text.peek()) != "{":
        arguments = yield from _held_arguments(text)
        yield from text.begin_call(name)
        yield Arguments(arguments)
        return
    yield from text.expect("{")
    num_spaces = 1
    while (char := (yield from text.peek())) and char.isspace():
        yield from text.expect(char)
        num_spaces += 1
    if char not in ('"', "}"):
        raise NotACallError
    text.give_back(num_spaces)
    yield from text.begin_call(name)
    yield from text.enclosed(is_streamed=True)


def _held_arguments(text: IncomingText) -> Parsing[str]:
    """Arguments as JSON text: of an object, a text of one, or null."""
    if (yield from text.takes("null")):
        return "{}"
    value = yield from text.enclosed()
    try:
        decoded = json.loads(value)
        if isinstance(decoded, str):
            value, decoded = decoded, json.loads(decoded)
    except (ValueError, RecursionError):
        raise NotACallError from None
    if not isinstance(decoded, dict) or not is_encodable(value):
        raise NotACallError
    return value


def json_of(value: Any) -> str:
    """JSON of an argument, or of all; halves of surrogate pairs are escapes. Raises ValueError if it has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_encodable(text) else json.dumps(value)


def _string(text: IncomingText) -> Parsing[str]:
    if (yield from text.peek()) != '"':
        raise NotACallError
    value = yield from text.enclosed()
    try:
        return str(json.loads(value))
    except ValueError:
        raise NotACallError from None


def _skip(text: IncomingText) -> Parsing[None]:
    """Take a JSON value."""
    if (yield from text.peek()) in ('"', "{", "["):
        yield from text.enclosed()
    else:
        yield from text.function_name()
