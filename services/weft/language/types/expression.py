"""Reads a condition's text: which names it uses, and the text rewritten with a CEL variable for each.

CEL knows no tensors. So ``max(inputs.X)`` becomes a variable that numpy computes before the evaluation, likewise
``inputs.X[3]`` and ``has(inputs.X)``; ``get(parameters, "k", d)`` becomes ``(is_there ? value : d)``. Replacements keep
the length, so a position that CEL reports is a position in the author's text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from weft.base.text.pbtxt import suggestion
from weft.language.types.proofs import ConditionToken, Fact, Term, plain, prove, tokens_of

_GENERATED = re.compile(r"_w[0-9]+")
_ALL_OF = re.compile(r"\s*_w[0-9]+\s*(&&\s*_w[0-9]+\s*)*")
_ELEMENT = re.compile(r"[0-9]{1,18}")
#: As CEL has it.
_MAX_CHARS = 100_000

REQUEST_FIELDS = ("id", "remaining_ms", "priority")
MAPS = ("parameters", "headers")
#: Where tensors come from: what a step sees, and what it (in a loop: the round) has given.
TENSORS = ("inputs", "outputs")


class Use(Enum):
    """How a CEL variable is computed from a tensor or map."""

    VALUE = "value"
    IS_PRESENT = "has"
    TEXT = "text"
    MAX = "max"
    MIN = "min"
    ARGMAX = "argmax"
    MEAN = "mean"
    SIZE = "size"
    IS_OK = "ok"
    ENTRY = "get"


REDUCTIONS = {use.value: use for use in (Use.TEXT, Use.MAX, Use.MIN, Use.ARGMAX, Use.MEAN)}
FUNCTIONS = (*REDUCTIONS, "get", "has", "size")
#: What other languages write, and what conditions have instead.
_FOREIGN = {
    "=": "==", "&": "&&", "|": "||", "and": "&&", "or": "||", "not": "!", "True": "true", "False": "false",
    "if": "TEST ? A : B",
}  # fmt: skip
_ORDERINGS = ("<", "<=", ">", ">=")


class Variable(NamedTuple):
    """A generated CEL variable for a use of ``key`` in ``space``, for example of X in ``inputs``.

    Attributes:
        indexes: Of ``VALUE``: the part that is read, for example (1, 2) for ``inputs.X[1][2]``; () is all of it.
        flag: The variable that says whether an entry of a map exists.
    """

    name: str
    use: Use
    space: str
    key: str
    indexes: tuple[int, ...] = ()
    flag: str = ""


class Reference(NamedTuple):
    """A name in the text, at character ``at``: a tensor of ``inputs`` or ``outputs``, or one of ``steps``."""

    space: str
    name: str
    at: int


class Element(NamedTuple):
    """An indexed tensor: ``indexes`` are at character ``at`` of the text."""

    space: str
    name: str
    indexes: tuple[int, ...]
    at: int


class Fault(NamedTuple):
    """An error at character ``at``; a ``tensor`` that it looks for in ``inputs`` may be one of ``outputs``."""

    at: int
    message: str
    tensor: str = ""


_NOTHING = ConditionToken("", "", 0)


@dataclass(slots=True)
class Expression:
    """A condition that is parsed but not compiled.

    Attributes:
        rewritten: The text for CEL.
        variables: Variables in ``rewritten`` that stand for tensors and ``get``.
        unproved: Those of ``references`` that may be read without a test that the tensor is present.
        narrowed: Inputs that are present whenever the whole expression is true.
        answered: Steps that answered whenever the whole expression is true.
        maps: ``parameters`` or ``headers`` if used as a whole.
        asked: (map, key) of the entries that ``has()`` or ``in`` tests.
        constant: True or False if the text is just that.
    """

    source: str
    rewritten: str = ""
    variables: list[Variable] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    elements: list[Element] = field(default_factory=list)
    unproved: set[Reference] = field(default_factory=set)
    narrowed: set[str] = field(default_factory=set)
    narrowed_outputs: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    maps: set[str] = field(default_factory=set)
    entries: list[Reference] = field(default_factory=list)
    asked: set[tuple[str, str]] = field(default_factory=set)
    request_fields: set[str] = field(default_factory=set)
    constant: bool | None = None
    faults: list[Fault] = field(default_factory=list)

    @property
    def asks_steps_alone(self) -> bool:
        """Whether it only tests that steps have answered: ``has(steps.a) && has(steps.b)``."""
        return {variable.use for variable in self.variables} == {Use.IS_OK} and bool(_ALL_OF.fullmatch(self.rewritten))

    @property
    def inputs(self) -> set[str]:
        """The tensors of ``inputs`` that it uses."""
        return {reference.name for reference in self.references if reference.space == "inputs"}


@lru_cache(maxsize=1024)
def read_expression(source: str) -> Expression:
    """Parse ``source``; never raises, errors are in ``faults``. Do not modify the result."""
    if len(source) > _MAX_CHARS:
        return Expression(
            source, faults=[Fault(0, f"the text has {len(source)} characters, the limit is {_MAX_CHARS}")]
        )
    return _ExpressionReader(source).read()


class _ExpressionReader:
    def __init__(self, source: str) -> None:
        self._tokens = tokens_of(source)
        self._open = _open_parentheses(self._tokens)
        self._expression = Expression(source)
        self._replacements: list[tuple[int, int, str]] = []
        self._variables: dict[tuple[Use, str, str, tuple[int, ...]], Variable] = {}
        self._tests: list[Term] = []
        self._uses: list[Term] = []
        self._used: dict[int, Reference] = {}  # by the token that the use starts at

    def read(self) -> Expression:
        expression = self._expression
        if len(self._tokens) == 1 and self._tokens[0].text in ("true", "false"):
            expression.constant = self._tokens[0].text == "true"
        index = 0
        while index < len(self._tokens):
            token = self._tokens[index]
            if token.kind == "name" and (index == 0 or self._tokens[index - 1].text != "."):
                index = self._name(index)
            elif token.kind == "symbol" and token.text in _FOREIGN:
                index = self._foreign(index)
            else:
                index += 1
        proof = prove([token.text for token in self._tokens], self._tests, self._uses)
        expression.unproved = {self._used[start] for start in proof.open}
        expression.narrowed = {fact.name for fact in proof.if_true if fact.space == "inputs"}
        expression.narrowed_outputs = {fact.name for fact in proof.if_true if fact.space == "outputs"}
        expression.answered = {fact.name for fact in proof.if_true if fact.space == "steps"}
        expression.variables = list(self._variables.values())
        expression.rewritten = _replaced(expression.source, self._replacements)
        return expression

    def _at(self, index: int) -> ConditionToken:
        is_inside = index < len(self._tokens)
        return self._tokens[index] if is_inside else ConditionToken("end", "", len(self._expression.source))

    def _fault(self, index: int, message: str, *, tensor: str = "") -> int:
        self._expression.faults.append(Fault(self._at(index).start, message, tensor))
        return index + 1

    def _foreign(self, index: int) -> int:
        text = self._at(index).text
        return self._fault(index, f"'{text}' means nothing in a condition; write '{_FOREIGN[text]}'")

    def _name(self, index: int) -> int:
        """Read an expression that begins with the name at ``index``; returns the index after it."""
        token, is_call = self._at(index), self._at(index + 1).text == "("
        if token.text in TENSORS:
            return self._tensor(index, index, Use.VALUE)
        if token.text == "steps":
            return self._step(index, index)
        if is_call and token.text in REDUCTIONS:
            return self._tensor(index, index + 2, REDUCTIONS[token.text])
        if is_call and token.text == "has" and self._at(index + 2).text in TENSORS:
            return self._tensor(index, index + 2, Use.IS_PRESENT)
        if is_call and token.text == "has" and self._at(index + 2).text == "steps":
            return self._step(index, index + 2)
        if is_call and token.text == "size" and self._is_tensor_alone(index + 2):
            return self._tensor(index, index + 2, Use.SIZE)
        if is_call and token.text == "get":
            return self._get(index)
        if token.text == "request":
            return self._request(index)
        if token.text in MAPS:
            self._check_header(index, index + 2)
            self._map(index)
        elif token.text in _FOREIGN:
            return self._foreign(index)
        elif is_call and token.text == "len":
            return self._fault(index, "there is no function 'len'; write size(X)")
        elif _GENERATED.fullmatch(token.text):
            return self._fault(index, f"undeclared reference to '{token.text}'")
        return index + 1

    def _tensor(self, start: int, index: int, use: Use) -> int:
        """Replace from token ``start`` to the end of a use of the tensor at ``index``."""
        space = self._at(index).text
        name, after = self._literal(index + 1) if space in TENSORS else (None, index)
        is_closed = use is Use.VALUE or self._at(after).text == ")"
        if name is None or not is_closed:
            if use is Use.VALUE:
                return self._fault(start, f'name one tensor: {space}.NAME, or {space}["NAME"]')
            if index - 1 in self._open:
                return self._fault(index - 1, "this parenthesis is not closed; add ')'")
            is_bare = space not in TENSORS and self._at(index).kind == "name" and self._at(index + 1).text == ")"
            shown = f"inputs.{space}" if is_bare else f"{space if space in TENSORS else 'inputs'}.NAME"
            message = f"{use.value}() takes one tensor: {use.value}({shown})"
            return self._fault(start, message, tensor=space if is_bare else "")
        expression = self._expression
        reference = Reference(space, name.text, name.start)
        expression.references.append(reference)
        element: tuple[int, ...] = ()
        last = after
        if use is Use.VALUE:
            element, behind = self._element(after)
            last = behind - 1
            if element:
                expression.elements.append(Element(space, name.text, element, self._at(after + 1).start))
        self._replace(start, last, self._variable(use, space, name.text, element).name)
        terms = self._tests if use is Use.IS_PRESENT else self._uses
        terms.append(Term(Fact(space, name.text), start, last + 1))
        self._used[start] = reference
        return last + 1

    def _element(self, index: int) -> tuple[tuple[int, ...], int]:
        """The integers in the ``[1][2]`` at ``index``, and the index after them."""
        numbers = []
        while self._at(index).text == "[" and self._at(index + 2).text == "]":
            number = self._at(index + 1).text
            if not _ELEMENT.fullmatch(number):
                break
            numbers.append(int(number))
            index += 3
        if self._at(index).text == "[" and self._at(index + 1).text == "-" and self._at(index + 3).text == "]":
            self._fault(index + 1, "elements are counted from 0; there is no negative index")
        return tuple(numbers), index

    def _is_tensor_alone(self, index: int) -> bool:
        name, after = self._literal(index + 1)
        return self._at(index).text in TENSORS and name is not None and self._at(after).text == ")"

    def _step(self, start: int, index: int) -> int:
        """Replace ``steps.NAME.ok`` or ``has(steps.NAME)`` from token ``start``; ``steps`` is at ``index``."""
        name, after = self._literal(index + 1)
        end = after + 1 if start != index else after + 2
        last = ")" if start != index else ".ok"
        if name is None or "".join(self._at(i).text for i in range(after, end)) != last:
            return self._fault(start, 'ask whether a step gave an answer: has(steps.NAME), or steps["NAME"].ok')
        self._expression.references.append(Reference("steps", name.text, name.start))
        self._replace(start, end - 1, self._variable(Use.IS_OK, "steps", name.text).name)
        self._tests.append(Term(Fact("steps", name.text), start, end))
        return end

    def _literal(self, index: int) -> tuple[ConditionToken | None, int]:
        """The name in the ``.NAME`` or ``["NAME"]`` at ``index``, and the index after it."""
        first, second = self._at(index), self._at(index + 1)
        if first.text == "." and second.kind == "name":
            return second, index + 2
        text = plain(second)
        if first.text == "[" and text is not None and self._at(index + 2).text == "]":
            return ConditionToken("name", text, second.start + 1), index + 3
        return None, index

    def _get(self, index: int) -> int:
        """Replace ``get(map, "key",`` by ``(flag ? value :``; the default and the bracket stay."""
        of, key = self._at(index + 2), plain(self._at(index + 4))
        commas = self._at(index + 3).text + self._at(index + 5).text
        if of.text not in MAPS or key is None or commas != ",,":
            return self._fault(index, 'get() takes a map, a key and a default: get(parameters, "key", "default")')
        self._check_header(index + 2, index + 4)
        self._check_default(index)
        variable = self._variable(Use.ENTRY, of.text, key)
        self._replace(index, index + 5, f"({variable.flag}?{variable.name}:")
        return index + 6

    def _check_default(self, index: int) -> None:
        """Check that a default of a parameter can be compared with the value beside the ``get(`` at ``index``."""
        default, operator = self._at(index + 6), self._at(index + 8).text
        if self._at(index + 2).text != "parameters" or self._at(index + 7).text != ")":
            return
        other = self._at(index + 9) if operator in _ORDERINGS else _NOTHING
        if index > 1 and self._at(index - 1).text in _ORDERINGS:
            other = self._at(index - 2)
        kinds = {"string": "text", "number": "a number"}
        if default.kind in kinds and other.kind in kinds and default.kind != other.kind:
            message = f"the default is {kinds[default.kind]}, but it is compared with {kinds[other.kind]}, {other.text}"
            self._fault(index + 6, message)

    def _map(self, index: int) -> None:
        """Record which entry of the map at ``index`` is read or tested."""
        space = self._at(index).text
        self._expression.maps.add(space)
        key, after = self._literal(index + 1)
        before = [token.text for token in self._tokens[max(0, index - 2) : index]]
        if key is not None and before == ["has", "("]:
            self._expression.asked.add((space, key.text))
        elif key is not None and self._at(after).text != "(":
            self._expression.entries.append(Reference(space, key.text, key.start))
        elif before[1:] == ["in"] and (asked := plain(self._at(index - 2))) is not None:
            self._expression.asked.add((space, asked))

    def _check_header(self, index: int, at: int) -> None:
        """Reject a binary header, or one with capitals, which is never present."""
        key = plain(self._at(at)) or (self._at(at).text if self._at(at - 1).text == "." else "")
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

    def _variable(self, use: Use, space: str, key: str, element: tuple[int, ...] = ()) -> Variable:
        known = self._variables.get((use, space, key, element))
        if known is None:
            number = 2 * len(self._variables)
            flag = f"_w{number + 1}" if use is Use.ENTRY else ""
            known = self._variables[use, space, key, element] = Variable(f"_w{number}", use, space, key, element, flag)
        return known

    def _replace(self, first: int, last: int, text: str) -> None:
        self._replacements.append((self._at(first).start, self._at(last).end, text))


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


def _open_parentheses(tokens: Sequence[ConditionToken]) -> set[int]:
    found: list[int] = []
    for i, token in enumerate(tokens):
        if token.text == "(":
            found.append(i)
        elif token.text == ")" and found:
            found.pop()
    return set(found)
