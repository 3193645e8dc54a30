"""A condition as text: what it names, and the same text with a variable in place of each name.

CEL knows no tensors. So ``max(inputs.X)`` becomes one variable that numpy fills before the evaluation,
``has(inputs.X)`` becomes another, and ``get(parameters, "k", d)`` becomes ``(is_there ? value : d)``. Every replacement
is as long as what it replaces, so a position that CEL reports is a position in the author's text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from weft_common.pbtxt import suggestion

_QUOTED = r'"""(?:[^\\]|\\.)*?"""' + r"|'''(?:[^\\]|\\.)*?'''" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'"
_TOKEN = re.compile(
    r"(?P<skip>\s+|//[^\n]*)"
    r"|(?P<raw>[bB]?[rR][bB]?(?:\"[^\"\n]*\"|'[^'\n]*'))"
    rf"|(?P<string>[bB]?(?:{_QUOTED}))"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<number>[0-9][A-Za-z0-9_.]*)"
    r"|(?P<symbol>&&|\|\||.)",
    re.DOTALL,
)
_GENERATED = re.compile(r"_w[0-9]+")

REQUEST_FIELDS = ("id", "remaining_ms", "priority")
MAPS = ("parameters", "headers")
_LATER = ("outputs", "steps")


class Use(Enum):
    """What a variable holds."""

    VALUE = "value"
    IS_PRESENT = "has"
    TEXT = "text"
    MAX = "max"
    MIN = "min"
    ARGMAX = "argmax"
    MEAN = "mean"
    PARAMETER = "parameters"
    HEADER = "headers"


REDUCTIONS = {use.value: use for use in (Use.TEXT, Use.MAX, Use.MIN, Use.ARGMAX, Use.MEAN)}
FUNCTIONS = (*REDUCTIONS, "get", "has", "size")


class Variable(NamedTuple):
    """A generated CEL variable; ``flag`` is the one that says whether an entry of a map is there."""

    name: str
    use: Use
    key: str
    flag: str = ""


class Reference(NamedTuple):
    """A tensor that the text names at character ``at``."""

    name: str
    at: int


class Fault(NamedTuple):
    """What is wrong at character ``at``."""

    at: int
    message: str


class _Token(NamedTuple):
    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(slots=True)
class Expression:
    """A condition that is read but not compiled.

    Attributes:
        source: The author's text.
        rewritten: The text for CEL.
        variables: Those that ``rewritten`` uses in place of tensors and ``get``.
        references: Every tensor, in order.
        tested: Tensors inside ``has()``.
        narrowed: Tensors that are there whenever the whole expression is true.
        maps: ``parameters`` or ``headers`` where used as a whole.
        request_fields: Fields of ``request`` that are used.
        constant: True or False where the text is just that.
        faults: What is wrong already.
    """

    source: str
    rewritten: str = ""
    variables: list[Variable] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    tested: set[str] = field(default_factory=set)
    narrowed: set[str] = field(default_factory=set)
    maps: set[str] = field(default_factory=set)
    request_fields: set[str] = field(default_factory=set)
    constant: bool | None = None
    faults: list[Fault] = field(default_factory=list)


def read_expression(source: str) -> Expression:
    """What ``source`` names; never raises, ``faults`` tells what is wrong."""
    return _Reader(source).read()


class _Reader:
    def __init__(self, source: str) -> None:
        self._tokens = [
            _Token(match.lastgroup or "", match.group(), match.start())
            for match in _TOKEN.finditer(source)
            if match.lastgroup != "skip"
        ]
        self._expression = Expression(source)
        self._replacements: list[tuple[int, int, str]] = []

    def read(self) -> Expression:
        expression = self._expression
        if len(self._tokens) == 1 and self._tokens[0].text in ("true", "false"):
            expression.constant = self._tokens[0].text == "true"
        index = 0
        while index < len(self._tokens):
            index = self._name(index) if self._starts_name(index) else index + 1
        expression.narrowed = set(self._narrowed())
        expression.rewritten = _replaced(expression.source, self._replacements)
        return expression

    def _at(self, index: int) -> _Token:
        return self._tokens[index] if index < len(self._tokens) else _Token("end", "", len(self._expression.source))

    def _starts_name(self, index: int) -> bool:
        return self._at(index).kind == "name" and (index == 0 or self._at(index - 1).text != ".")

    def _fault(self, index: int, message: str) -> int:
        """Note what is wrong at a token; the index to go on from."""
        self._expression.faults.append(Fault(self._at(index).start, message))
        return index + 1

    def _name(self, index: int) -> int:
        """Read what begins with the name at ``index``; the index after it."""
        token, is_call = self._at(index), self._at(index + 1).text == "("
        if token.text == "inputs":
            return self._tensor(index, index, Use.VALUE)
        if is_call and token.text in REDUCTIONS:
            return self._tensor(index, index + 2, REDUCTIONS[token.text])
        if is_call and token.text == "has" and self._at(index + 2).text == "inputs":
            return self._tensor(index, index + 2, Use.IS_PRESENT)
        if is_call and token.text == "get":
            return self._get(index)
        if token.text == "request":
            return self._request(index)
        if token.text in MAPS:
            self._check_header(index, index + 2)
            self._expression.maps.add(token.text)
        elif token.text in _LATER:
            return self._fault(
                index, f"'{token.text}' is not supported by this version of Weft; conditions see 'inputs'"
            )
        elif _GENERATED.fullmatch(token.text):
            return self._fault(index, f"undeclared reference to '{token.text}'")
        return index + 1

    def _tensor(self, start: int, index: int, use: Use) -> int:
        """Replace from token ``start`` to the end of a use of the tensor at ``index``."""
        name, after = self._literal(index, after=1) if self._at(index).text == "inputs" else (None, index)
        is_closed = use is Use.VALUE or self._at(after).text == ")"
        if name is None or not is_closed:
            if use is Use.VALUE:
                return self._fault(start, 'name one tensor: inputs.NAME, or inputs["NAME"]')
            if self._at(index).text not in _LATER:
                self._fault(start, f"{use.value}() takes one tensor: {use.value}(inputs.NAME)")
            return start + 1
        expression = self._expression
        expression.references.append(Reference(name.text, name.start))
        if use is Use.IS_PRESENT:
            expression.tested.add(name.text)
        last = after - 1 if use is Use.VALUE else after
        self._replace(start, last, self._variable(use, name.text).name)
        return last + 1

    def _literal(self, index: int, *, after: int) -> tuple[_Token | None, int]:
        """The name in ``.NAME`` or ``["NAME"]``, ``after`` tokens behind ``index``, and the index behind it."""
        first, second = self._at(index + after), self._at(index + after + 1)
        if first.text == "." and second.kind == "name":
            return second, index + after + 2
        text = _plain(second)
        if first.text == "[" and text is not None and self._at(index + after + 2).text == "]":
            return _Token("name", text, second.start + 1), index + after + 3
        return None, index

    def _get(self, index: int) -> int:
        """Replace ``get(map, "key",`` by ``(flag ? value :``; the default and the bracket stay."""
        of, key = self._at(index + 2), _plain(self._at(index + 4))
        commas = self._at(index + 3).text + self._at(index + 5).text
        if of.text not in MAPS or key is None or commas != ",,":
            return self._fault(index, 'get() takes a map, a key and a default: get(parameters, "key", "default")')
        self._check_header(index + 2, index + 4)
        variable = self._variable(Use(of.text), key)
        self._replace(index, index + 5, f"({variable.flag}?{variable.name}:")
        return index + 6

    def _check_header(self, index: int, at: int) -> None:
        """A header that is binary, or written with capitals, is never there."""
        key = _plain(self._at(at)) or (self._at(at).text if self._at(at - 1).text == "." else "")
        if self._at(index).text != "headers" or not key:
            return
        if key.endswith("-bin"):
            self._fault(at, f"header '{key}' is binary; conditions see text headers only")
        elif key != key.lower():
            self._fault(at, f"header '{key}' never matches; names of headers are lower-case: '{key.lower()}'")

    def _request(self, index: int) -> int:
        token = self._at(index + 2)
        if self._at(index + 1).text != "." or token.kind != "name":
            return self._fault(index, f"name one field of request: {', '.join(REQUEST_FIELDS)}")
        if token.text not in REQUEST_FIELDS:
            hint = suggestion(token.text, REQUEST_FIELDS)
            return self._fault(index + 2, f"unknown field '{token.text}' of request{hint}")
        self._expression.request_fields.add(token.text)
        return index + 3

    def _variable(self, use: Use, key: str) -> Variable:
        variables = self._expression.variables
        for known in variables:
            if known.use is use and known.key == key:
                return known
        number = 2 * len(variables)
        flag = f"_w{number + 1}" if use in (Use.PARAMETER, Use.HEADER) else ""
        variables.append(Variable(f"_w{number}", use, key, flag))
        return variables[-1]

    def _replace(self, first: int, last: int, text: str) -> None:
        self._replacements.append((self._at(first).start, self._at(last).end, text))

    def _narrowed(self) -> Iterator[str]:
        """Tensors in a ``has()`` that is one of the terms of ``a && b && c``."""
        depth, terms, term = 0, list[list[_Token]](), list[_Token]()
        for token in self._tokens:
            depth += (token.text in ("(", "[", "{")) - (token.text in (")", "]", "}"))
            if depth == 0 and token.text in ("||", "?"):
                return
            if depth == 0 and token.text == "&&":
                terms.append(term)
                term = []
            else:
                term.append(token)
        for words in (*terms, term):
            texts = [word.text for word in words]
            if texts[:4] == ["has", "(", "inputs", "."] and len(texts) == 6:
                yield texts[4]
            elif texts[:4] == ["has", "(", "inputs", "["] and len(texts) == 7:
                yield _plain(words[4]) or ""


def _plain(token: _Token) -> str | None:
    """Content of a string token without escapes; None for anything else."""
    if token.kind != "string" or "\\" in token.text or token.text[0] in "bB":
        return None
    quotes = 3 if token.text.startswith(('"""', "'''")) else 1
    return token.text[quotes:-quotes]


def _replaced(source: str, replacements: list[tuple[int, int, str]]) -> str:
    """``source`` with each range replaced by text padded to its length, its line ends kept."""
    parts, done = [], 0
    for start, end, text in replacements:
        lines = source[start:end].split("\n")
        widest = max(range(len(lines)), key=lambda i: len(lines[i]))
        padded = [text.ljust(len(line)) if i == widest else " " * len(line) for i, line in enumerate(lines)]
        parts += [source[done:start], "\n".join(padded)]
        done = end
    return "".join([*parts, source[done:]])
