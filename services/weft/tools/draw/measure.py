"""How wide a text will be at most, without a font: as in a wide one (DejaVu Sans, Verdana), and a little more."""

import textwrap
import unicodedata
from collections.abc import Iterable

#: Characters of one width, in parts of the font size.
_WIDTHS = {
    **dict.fromkeys(" .,:;'!|ijlI/\\", 0.42),
    **dict.fromkeys('()[]`-frt"*', 0.52),
    **dict.fromkeys("mwMW@%+<>=~#^&OQGDHNU", 1.0),
}
_NARROW, _CAPITAL, _WIDE = 0.68, 0.84, 1.05
_BOLD = 1.13
_MAX_LINE_CHARS = 46

LINE_HEIGHT = 1.35


def text_width(text: str, font_size: float, *, is_bold: bool = False) -> float:
    """Width in the units of ``font_size``; never less than a browser's sans-serif font needs."""
    width = sum(map(_character_width, text))
    return width * font_size * (_BOLD if is_bold else 1.0)


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, long ones broken."""
    return [part for line in lines for part in textwrap.wrap(line, _MAX_LINE_CHARS) or [""]]


def _character_width(character: str) -> float:
    known = _WIDTHS.get(character)
    if known is not None:
        return known
    if character > "\x7f":
        is_wide = unicodedata.east_asian_width(character) in "WF" or character > "\uffff"
        return _WIDE if is_wide else 1.0
    return _CAPITAL if character.isupper() else _NARROW
