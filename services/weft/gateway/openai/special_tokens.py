"""Special tokens in what users write: they stay text, so that no message can pretend to be another's."""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weft.base.text.alternatives import any_of

#: Put behind the first character of what would be a special token; no width, so that people see the same text.
BREAK = "\u200b"
#: Special tokens of common models, for one that does not name its own, as a graph around a language model.
_COMMON = r"<\|[^<>|\s]{1,64}\|>"
_MAX_COMMON_CHARS = 68
#: A text is searched by pieces: no other thread runs meanwhile.
_PIECE_CHARS = 1 << 16


def special_texts(listed: str, named: Iterable[str]) -> tuple[str, ...]:
    """The texts of a model's special tokens.

    Args:
        listed: A JSON list of them; anything else counts as none.
        named: Further ones.
    """
    try:
        texts = json.loads(listed)
    except (ValueError, RecursionError):
        texts = []
    return tuple({text for text in (*(texts if isinstance(texts, list) else ()), *named) if isinstance(text, str)})


def breaker(texts: Iterable[str]) -> Callable[[str], str]:
    """A function that puts ``BREAK`` into every special token of a text."""
    tokens = {text for text in texts if len(text) > 1}
    pattern = re.compile(f"{any_of(tokens)}|{_COMMON}")
    longest = max([_MAX_COMMON_CHARS, *map(len, tokens)])

    def broken(text: str) -> str:
        changed, position = io.StringIO(), 0
        while position < len(text):
            end = position + _PIECE_CHARS
            found = pattern.search(text, position, end + longest)
            if found is None or found.start() >= end:
                changed.write(text[position:end])
                position = end
            else:
                begin = found.start() + 1
                changed.write(text[position:begin] + BREAK + text[begin : found.end()])
                position = found.end()
        return changed.getvalue()

    return broken


def in_texts(change: Callable[[str], str], value: Any) -> Any:
    """The value, of JSON, with every text in it changed; names of objects stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: in_texts(change, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_texts(change, item) for item in value]
    return value
