"""``<tool_call>{"name": ..., "arguments": ...}</tool_call>``: Hermes, Qwen 2.5 and 3, and models trained like them."""

from weft.gateway.openai.tools.formats import ForcedCalls, Schemas, ToolFormat, parse_object_call
from weft.gateway.openai.tools.incoming import IncomingText, Parsing

_START, _END = "<tool_call>", "</tool_call>"


def _parse(text: IncomingText, schemas: Schemas) -> Parsing[None]:
    while (yield from text.content_until(_START)):
        yield from text.attempt(_call(text))


def _call(text: IncomingText) -> Parsing[None]:
    yield from text.spaces()
    yield from parse_object_call(text)
    yield from text.spaces()
    if not (yield from text.takes(_END)):
        text.give_back()


FORMAT = ToolFormat("hermes", (_START,), _parse, ForcedCalls(f"{_START}\n", f"\n{_END}\n{_START}\n"))
