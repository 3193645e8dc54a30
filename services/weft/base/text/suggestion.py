"""Spelling suggestions for messages, and foreign text made safe for a terminal."""

from collections.abc import Iterable
from difflib import get_close_matches


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
