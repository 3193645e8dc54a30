"""``<|start|>assistant<|channel|>CHANNEL to=functions.NAME<|message|>TEXT<|end|>``, one after another: gpt-oss.

The channel ``analysis`` is reasoning, and so is a message to another recipient than a function; ``final``, and
``commentary`` to nobody, are content. A call's text is JSON.
"""

import re

from weft.gateway.openai.tools.formats import Schemas, ToolFormat, parse_arguments
from weft.gateway.openai.tools.incoming import Content, IncomingText, NotACallError, Parsing, Reasoning

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(functions\.)?([^\s<]+)")


def parse(text: IncomingText, schemas: Schemas) -> Parsing[None]:
    """Parse all messages of an answer; text outside of one is content."""
    del schemas
    while marker := (yield from text.content_until(_START, _CHANNEL, *_ENDS)):
        text.commit()
        if marker in _ENDS:
            continue
        try:
            header, _ = yield from text.text_until(_MESSAGE)
        except NotACallError:  # cut off
            text.commit()
            return
        text.commit()
        header = header.rpartition(_START)[2]  # a message before it may have no text
        recipient = _RECIPIENT.search(header)
        is_call = recipient is not None and recipient[1] is not None
        if recipient is not None and is_call:
            yield from text.attempt(_call(text, recipient[2]))
        is_reasoning = not is_call and (recipient is not None or "analysis" in header)
        for event in text.content_until(_START, *_ENDS):
            yield Reasoning(event.text) if is_reasoning and isinstance(event, Content) else event
        text.give_back()


def _call(text: IncomingText, name: str) -> Parsing[None]:
    yield from text.spaces()
    yield from parse_arguments(text, name)
    yield from text.spaces()
    text.end_call()


FORMAT = ToolFormat("harmony", (_CHANNEL,), parse, has_special_tokens=True)
