"""Derives what a condition proves: that a tensor is present, or that a step answered.

``has(inputs.X) && max(inputs.X) > 1`` never reads an absent tensor: CEL ignores an error on one side of ``&&`` if the
other side is false, of ``||`` if it is true, and evaluates only one branch of ``? :``. The order of the sides of ``&&``
and ``||`` does not matter.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """A token of the text; ``kind`` is raw, string, name, number, symbol or end."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        """Offset after the token."""
        return self.start + len(self.text)


def tokens_of(source: str) -> list[ConditionToken]:
    """Tokens of any text, without spaces and comments."""
    matches = _TOKEN.finditer(source)
    return [ConditionToken(m.lastgroup or "", m.group(), m.start()) for m in matches if m.lastgroup != "skip"]


def plain(token: ConditionToken) -> str | None:
    """Content of a string token without escapes; None for other tokens."""
    if token.kind != "string" or "\\" in token.text or token.text[0] in "bB":
        return None
    quotes = 3 if token.text.startswith(('"""', "'''")) else 1
    return token.text[quotes:-quotes]


#: What is deeper in brackets proves nothing.
_MAX_DEPTH = 32
_OPENING = {"(": ")", "[": "]", "{": "}"}
_CLOSING = frozenset(_OPENING.values())
_ENDS = _CLOSING | {",", ":", ""}


class Fact(NamedTuple):
    """A tensor of ``space`` is present; for the space ``steps``, a step has answered."""

    space: str
    name: str


class Term(NamedTuple):
    """Tokens from ``start`` to before ``end`` that test a fact, or require it."""

    fact: Fact
    start: int
    end: int


@dataclass(slots=True)
class Proof:
    """Facts that a part of a condition proves if it is true or false."""

    if_true: set[Fact] = field(default_factory=set)
    if_false: set[Fact] = field(default_factory=set)
    open: dict[int, Fact] = field(default_factory=dict)


def prove(tokens: Sequence[str], tests: Collection[Term], uses: Collection[Term]) -> Proof:
    """Facts that a condition proves; few for invalid text."""
    prover = _Prover(tokens, {term.start: term for term in tests}, {term.start: term for term in uses})
    whole = prover.choice(0)
    while prover.index < len(tokens):  # behind a bracket that closes nothing
        prover.index += 1
        whole = _joined([whole, prover.choice(0)])
    return whole


class _Prover:
    def __init__(self, tokens: Sequence[str], tests: Mapping[int, Term], uses: Mapping[int, Term]) -> None:
        self._tokens = tokens
        self._tests = tests
        self._uses = uses
        self.index = 0

    def choice(self, depth: int) -> Proof:
        """Parse ``a ? b : c``, or a part of it; ends before a comma or a closing bracket."""
        test = self._either(depth)
        branches: list[Proof] = []
        known: set[Fact] = set()  # what the tests so far prove by being false
        while self._take("?"):
            chosen = self.choice(depth + 1) if depth < _MAX_DEPTH else self._either(depth)
            branches += [_closed(test, known), _closed(chosen, known | test.if_true)]
            if not self._take(":"):
                return _joined(branches)
            known = known | test.if_false
            test = self._either(depth)
        return _joined([*branches, _closed(test, known)]) if branches else test

    def _either(self, depth: int) -> Proof:
        parts = [_negated(self._both(depth))]
        while self._take("||"):
            parts.append(_negated(self._both(depth)))
        return _negated(_all(parts))

    def _both(self, depth: int) -> Proof:
        parts = [self._term(depth)]
        while self._take("&&"):
            parts.append(self._term(depth))
        return _all(parts)

    def _term(self, depth: int) -> Proof:
        """Parse an operand; it proves something if it is a test, or one in ``!`` and ``( )``."""
        is_negated = False
        while self._take("!"):
            is_negated = not is_negated
        parts: list[Proof] = []
        while (text := self._text()) not in _ENDS and text not in ("?", "||", "&&"):
            parts.append(self._piece(text, depth))
        if len(parts) != 1:
            return _joined(parts)
        (only,) = parts
        return _negated(only) if is_negated else only

    def _piece(self, text: str, depth: int) -> Proof:
        """Parse a test, a use, an expression in brackets, or any other token."""
        start = self.index
        if test := self._tests.get(start):
            self.index = test.end
            return Proof(if_true={test.fact})
        if use := self._uses.get(start):
            self.index = use.end
            return Proof(open={start: use.fact})
        self.index += 1
        if text not in _OPENING:
            return Proof()
        parts = []
        while True:
            parts.append(self.choice(depth + 1) if depth < _MAX_DEPTH else self._skipped())
            if not (self._take(",") or self._take(":")):
                break
        self._take(_OPENING[text])
        return parts[0] if text == "(" and len(parts) == 1 else _joined(parts)

    def _skipped(self) -> Proof:
        """Skip the content of brackets nested too deeply."""
        start, depth = self.index, 0
        while (text := self._text()) and (depth or text not in _CLOSING):
            depth += (text in _OPENING) - (text in _CLOSING)
            self.index += 1
        return Proof(open={at: use.fact for at, use in self._uses.items() if start <= at < self.index})

    def _text(self) -> str:
        return self._tokens[self.index] if self.index < len(self._tokens) else ""

    def _take(self, text: str) -> bool:
        is_next = self._text() == text
        self.index += is_next
        return is_next


def _all(parts: Sequence[Proof]) -> Proof:
    if len(parts) == 1:
        return parts[0]
    known = set().union(*(part.if_true for part in parts))
    return _closed(Proof(known, set.intersection(*(part.if_false for part in parts)), _joined(parts).open), known)


def _negated(proof: Proof) -> Proof:
    return Proof(proof.if_false, proof.if_true, proof.open)


def _joined(parts: Sequence[Proof]) -> Proof:
    return Proof(open={at: fact for part in parts for at, fact in part.open.items()})


def _closed(proof: Proof, facts: set[Fact]) -> Proof:
    return replace(proof, open={at: fact for at, fact in proof.open.items() if fact not in facts})
