"""``[TOOL_CALLS]`` and a list of JSON objects, or one ``name{arguments}`` or ``name[ARGS]{arguments}``: Mistral."""

import secrets
import string

from weft.gateway.openai.tools.formats import ForcedCalls, Schemas, ToolFormat, parse_arguments, parse_object_call
from weft.gateway.openai.tools.incoming import IncomingText, Parsing

_START, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _parse(text: IncomingText, schemas: Schemas) -> Parsing[None]:
    while (yield from text.content_until(_START)):
        yield from text.attempt(_calls(text))


def _calls(text: IncomingText) -> Parsing[None]:
    yield from text.spaces()
    if (yield from text.takes("[")):
        yield from _list(text)
    elif (yield from text.peek()) == "{":
        yield from parse_object_call(text)
    else:
        name = yield from text.function_name()
        if (yield from text.takes(_ID)):
            yield from text.function_name()
        yield from text.takes(_ARGUMENTS)
        yield from text.spaces()
        yield from parse_arguments(text, name)
        text.end_call()


def _list(text: IncomingText) -> Parsing[None]:
    while True:
        yield from text.spaces()
        yield from parse_object_call(text)
        yield from text.spaces()
        if not (yield from text.takes(",")):
            yield from text.takes("]")
            return


def _make_id() -> str:
    """Nine letters and digits: Mistral's templates refuse others."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


FORCED = ForcedCalls(f"{_START} [", ", ")
FORMAT = ToolFormat("mistral", (_START,), _parse, FORCED, has_special_tokens=True, make_id=_make_id)
