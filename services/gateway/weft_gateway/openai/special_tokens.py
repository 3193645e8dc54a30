"""Special tokens in what users write: they stay text, so that no message can pretend to be another's."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: Put behind the first character of what would be a special token; no width, so that people see the same text.
BREAK = "\u200b"
#: Special tokens of common models, for one that does not name its own, as a graph around a language model.
_COMMON = r"<\|[^<>|\s]{1,64}\|>"


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
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    pattern = re.compile("|".join([*map(re.escape, longest_first), _COMMON]))
    return lambda text: pattern.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)


def in_texts(change: Callable[[str], str], value: Any) -> Any:
    """The value, of JSON, with every text in it changed; names of objects stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: in_texts(change, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [in_texts(change, item) for item in value]
    return value
