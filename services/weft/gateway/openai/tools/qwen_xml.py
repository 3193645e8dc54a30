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
        yield Arguments(f"{separator}{json_of(key)}: {_typed(value, properties.get(key))}")
        separator = ", "
        text.commit()
    yield Arguments("{}" if separator == "{" else "}")
    text.end_call()
    yield from text.spaces()
    if not (yield from text.takes(_END)):
        text.give_back()


def _typed(value: str, schema: Any) -> str:
    """JSON of a parameter: of the text where the schema allows text, else of the JSON that it is, if it is any."""
    try:
        types = list(_types(schema))
        if "string" not in types or ("null" in types and value == "null"):
            return json_of(json.loads({"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)))
    except (ValueError, RecursionError):
        pass
    return json_of(value)


def _types(schema: Any) -> Iterator[Any]:
    """Types that a schema names; what is no schema names none."""
    if not isinstance(schema, Mapping):
        return
    given, values = schema.get("type"), schema.get("enum")
    yield from given if isinstance(given, list) else [given]
    if given is None and isinstance(values, list) and all(isinstance(each, str) for each in values):
        yield "string"
    for name in ("anyOf", "oneOf", "allOf"):
        for each in parts if isinstance(parts := schema.get(name), list) else ():
            yield from _types(each)


FORMAT = ToolFormat("qwen3_xml", (_FUNCTION,), _parse, around=(f"{_START}\n{_FUNCTION}", ">"))
