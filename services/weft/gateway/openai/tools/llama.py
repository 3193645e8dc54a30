"""``{"name": ..., "parameters": ...}``, several separated by semicolons, behind ``<|python_tag|>`` or not: Llama 3."""

from weft.gateway.openai.tools.formats import ForcedCalls, Schemas, ToolFormat, parse_object_call
from weft.gateway.openai.tools.incoming import IncomingText, Parsing

_TAG = "<|python_tag|>"


def _parse(text: IncomingText, schemas: Schemas) -> Parsing[None]:
    while marker := (yield from text.content_until(_TAG, "{")):
        if marker == "{":
            text.give_back()
        yield from text.attempt(_calls(text, schemas))


def _calls(text: IncomingText, schemas: Schemas) -> Parsing[None]:
    while True:
        yield from text.spaces()
        # Nothing else marks it as a call, and an answer may be JSON too.
        yield from parse_object_call(text, schemas, needs_arguments=True)
        yield from text.spaces()
        if not (yield from text.takes(";")):
            text.give_back()
            return


FORMAT = ToolFormat(
    "llama3_json",
    (_TAG, '"parameters": dictionary'),
    _parse,
    ForcedCalls("", "; ", "parameters"),
    has_special_tokens=True,
)
