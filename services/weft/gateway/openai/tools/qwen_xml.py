"""``<tool_call><function=f><parameter=a>1</parameter></function></tool_call>``: Qwen 3 Coder and 3.5."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from weft.gateway.openai.tools.formats import Schemas, ToolFormat, json_of
from weft.gateway.openai.tools.incoming import Arguments, IncomingText, Parsing

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _parse(text: IncomingText, schemas: Schemas) -> Parsing[None]:
    while marker := (yield from text.content_until(_START, _FUNCTION)):
        if marker == _FUNCTION:
            text.give_back()
        yield from text.attempt(_call(text, schemas))


def _call(text: IncomingText, schemas: Schemas) -> Parsing[None]:
    yield from text.spaces()
    yield from text.expect(_FUNCTION)
    name = yield from text.function_name()
    yield from text.expect(">")
    yield from text.begin_call(name)
    properties = schemas.get(name, {}).get("properties", {})
    separator = "{"
    while True:
        yield from text.spaces()
        if (yield from text.takes(_FUNCTION_END)) or (yield from text.takes(_END)):
            break
        yield from text.expect(_PARAMETER)
        key, _ = yield from text.text_until(">")
        # A model may forget the end of a value.
        value, marker = yield from text.text_until(_PARAMETER_END, _PARAMETER, _FUNCTION_END)
        if marker != _PARAMETER_END:
            text.give_back(len(marker))
        value = value.removeprefix("\n").removesuffix("\n")
        yield Arguments(f"{separator}{json_of(key)}: {json_of(_typed(value, properties.get(key)))}")
        separator = ", "
        text.commit()
    yield Arguments("{}" if separator == "{" else "}")
    text.end_call()
    yield from text.spaces()
    if not (yield from text.takes(_END)):
        text.give_back()


def _typed(value: str, schema: Any) -> Any:
    """The value of a parameter: text where the schema allows text, else JSON, if it is any."""
    types = set(_types(schema))
    if "null" in types and value == "null":
        return None
    if "string" in types:
        return value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value.strip(), value))
    except (ValueError, RecursionError):
        return value


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    given = schema.get("type", "string" if "enum" in schema and all(isinstance(v, str) for v in schema["enum"]) else [])
    yield from [given] if isinstance(given, str) else given
    for name in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(name, ()):
            yield from _types(each)


FORMAT = ToolFormat("qwen3_xml", (_FUNCTION,), _parse)
