"""The words of a condition."""

import re
from typing import NamedTuple

_QUOTED = r'"""(?:[^\\]|\\.)*?"""' + r"|'''(?:[^\\]|\\.)*?'''" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'"
_TOKEN = re.compile(
    r"(?P<skip>\s+|//[^\n]*)"
    r"|(?P<raw>[bB]?[rR][bB]?(?:\"[^\"\n]*\"|'[^'\n]*'))"
    rf"|(?P<string>[bB]?(?:{_QUOTED}))"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<number>[0-9][A-Za-z0-9_.]*)"
    r"|(?P<symbol>&&|\|\||[=!<>]=|.)",
    re.DOTALL,
)


class ConditionToken(NamedTuple):
    """A word of the text; ``kind`` is raw, string, name, number, symbol or end."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """Where the next may begin."""
        return self.start + len(self.text)


def tokens_of(source: str) -> list[ConditionToken]:
    """The words of any text; spaces and comments are left out."""
    matches = _TOKEN.finditer(source)
    return [ConditionToken(m.lastgroup or "", m.group(), m.start()) for m in matches if m.lastgroup != "skip"]


def plain(token: ConditionToken) -> str | None:
    """Content of a string token without escapes; None for anything else."""
    if token.kind != "string" or "\\" in token.text or token.text[0] in "bB":
        return None
    quotes = 3 if token.text.startswith(('"""', "'''")) else 1
    return token.text[quotes:-quotes]
