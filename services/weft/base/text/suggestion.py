"""Spelling suggestions for messages, foreign text made safe for a terminal, and a fast pattern for many texts."""

import os.path
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches


def any_of(texts: Collection[str]) -> str:
    """A pattern that matches any of these texts, the longest first; "" is ignored.

    Common prefixes are shared: otherwise, of 250 alternatives all would be tried at each character, for half a second
    in a megabyte of ``<``, in which no other thread runs.
    """
    by_first: dict[str, set[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], set()).add(text)
    by_first.pop("", None)
    parts: list[str] = []
    for group in by_first.values():
        prefix = os.path.commonprefix(list(group))  # noqa: RUF071  # characters are meant
        rests = {text[len(prefix) :] for text in group}
        part = re.escape(prefix)
        if rests != {""}:
            part += any_of(rests) + ("?" if "" in rests else "")
        parts.append(part)
    return f"(?:{'|'.join(parts)})" if parts else "(?!)"


def printable(text: str) -> str:
    """Replace terminal control characters by U+FFFD; keep line ends and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


_NUM_LISTED_NAMES = 16
_MIN_PREFIX = 3


def suggestion(name: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest of ``names``, else the allowed names, else ""."""
    known = [known for known in dict.fromkeys(names) if known]
    meant = _nearest(name, known)
    if meant:
        return f"; did you mean '{meant}'?"
    return f"; use one of: {', '.join(known)}" if 0 < len(known) <= _NUM_LISTED_NAMES else ""


def _nearest(name: str, known: list[str]) -> str:
    lower = name.lower()
    matches = [one for one in known if one.lower() == lower]
    if not matches and len(name) >= _MIN_PREFIX:
        matches = sorted((one for one in known if one.lower().startswith(lower)), key=len)
    matches = matches or get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else ""
