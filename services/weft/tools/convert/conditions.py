"""Translates conditions of KServe (gjson paths that must exist in a JSON body) to CEL over tensors.

Only exact translations are made. Any other condition becomes ``CHECK("...")``, which is unknown to CEL, so that ``weft
check`` reports it.

Source:
    https://github.com/tidwall/gjson/blob/master/SYNTAX.md
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.base.tensors import FLOATS, INTEGERS
from weft.language.types.signatures import TensorType
from weft.tools.convert.draft import DraftCondition, Tensors

_IN_BODY = re.compile(r"\[@this\]\.#\((?P<test>.*)\)", re.DOTALL)
_ANY = re.compile(r"(?P<path>[^#()]*)\.#\((?P<test>[^()]*)\)", re.DOTALL)
_NAMED = re.compile(r"(?P<list>inputs|outputs)\.#\(name==\"(?P<name>[^\"]+)\"\)(\.data)?")
_TEST = re.compile(r"(?P<path>[^=!<>%]*)(?P<op>==|!=|!%|<=|>=|<|>|=|%)\s*(?P<value>.*)", re.DOTALL)
_PLAIN_PATH = re.compile(r"[^*?|@{}\[\]#()\\\"]+")
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NEGATED = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}

_MEANS_ANY = "KServe's condition {text} holds if any element passes, as in gjson"
_GLOBS = ("%", "!%")
_WILDCARDS = {"*": ".*", "?": "."}
_MAX_CHARS = 1000
#: Keys of a JSON body whose value is all its rows.
_ROWS = ("instances", "predictions")
_LISTS = ("inputs", "outputs")

Literal = str | int | float | bool


class UntranslatableError(Exception):
    """CEL over tensors cannot express a condition; the message says why."""


class JsonPath(NamedTuple):
    """A tensor, or ``parameter``, and its indexes in JSON."""

    tensor: str
    indexes: tuple[int, ...]
    parameter: str = ""


@dataclass(slots=True)
class Body:
    """The tensors that replace the JSON body that a condition reads.

    Attributes:
        prefix: "inputs" or "outputs".
        tensors: By the names that JSON would use; None if unknown.
        renamed: Names that the graph uses instead.
        read: Tensors that conditions named, by the names in ``tensors``.
        remarks: Questions for a person to decide; ``notes`` are surprises for the reader.
        is_of_one_row: Whether a condition works only for one-row requests.
    """

    prefix: str
    tensors: Tensors | None
    renamed: Mapping[str, str] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_of_one_row: bool = False
    is_request: bool = False

    def _place(self, path: str) -> JsonPath:
        named = _NAMED.match(path)
        if named:
            rest = path[named.end() :].lstrip(".")
            return JsonPath(named["name"], _indexes(rest.split(".") if rest else []))
        if not _PLAIN_PATH.fullmatch(path):
            raise UntranslatableError(f"the path '{path}' uses what only gjson has")
        first, *rest_of = path.split(".")
        if first == "parameters" and len(rest_of) == 1:
            return JsonPath("", (), rest_of[0])
        if first in _ROWS:
            fields = [part for part in rest_of if not part.isdigit()]
            if len(fields) > 1:
                raise UntranslatableError(f"'{path}' reaches into an object of objects; a tensor has no fields")
            return JsonPath(fields[0] if fields else self._only(first), _indexes(p for p in rest_of if p.isdigit()))
        if first in _LISTS:
            return self._listed(path, rest_of)
        if self.is_request and first not in (self.tensors or {}):
            self.remarks.append(
                f"'{first}' was a field of the request's JSON body; it is a request parameter here, unless an input of "
                "the graph has that name"
            )
            if rest_of:
                raise UntranslatableError(f"'{path}' reaches into an object; a parameter has no fields")
            return JsonPath("", (), first)
        return JsonPath(first, _indexes(rest_of))

    def _reference(self, tensor: str) -> str:
        self.read.append(tensor)
        name = self.renamed.get(tensor, tensor)
        return f"{self.prefix}.{name}" if _FIELD.fullmatch(name) else f"{self.prefix}[{json.dumps(name)}]"

    def _known(self, tensor: str) -> TensorType | None:
        return self.tensors.get(tensor) if self.tensors else None

    def _only(self, key: str) -> str:
        """Name of the only tensor, meant by ``predictions`` or ``instances``."""
        if self.tensors is not None and len(self.tensors) == 1:
            return next(iter(self.tensors))
        if self.tensors and key not in self.tensors:
            names = ", ".join(self.tensors)
            raise UntranslatableError(f"'{key}' may be any of the tensors {names}; name the one that is meant")
        if not self.tensors:
            self.remarks.append(f"'{key}' stands for the only tensor of the JSON body; write its name")
        return key

    def _listed(self, path: str, rest: list[str]) -> JsonPath:
        """The tensor of ``outputs.0.data.3``."""
        if not rest or not rest[0].isdigit() or (len(rest) > 1 and rest[1] != "data"):
            raise UntranslatableError(f"'{path}' is no value of a tensor; outputs.0.data.0 is one")
        if self.tensors is None or int(rest[0]) >= len(self.tensors):
            raise UntranslatableError(f"which tensor '{path}' means is not known; name it")
        tensor = list(self.tensors)[int(rest[0])]
        return JsonPath(tensor, _indexes(rest[2:]))

    def translated(self, text: str, *, is_negated: bool) -> str:
        """Translate the condition to CEL. Raises UntranslatableError."""
        if len(text) > _MAX_CHARS:
            raise UntranslatableError(f"it has {len(text)} characters")
        if not text:
            raise UntranslatableError(
                "there is none, and KServe never chooses such a step; 'otherwise: true' is for what is left"
            )
        if text == "@this":
            return "false" if is_negated else "true"
        if "&&" in text or "||" in text:
            raise UntranslatableError("gjson has no '&&' and no '||'")
        if text.startswith("{"):
            raise UntranslatableError("JSONPath in braces is the spelling of KServe before 0.9")
        whole = _IN_BODY.fullmatch(text)
        if whole:
            return self._test(whole["test"].strip(), is_negated=is_negated)
        return self._existence(text, is_negated=is_negated)

    def _test(self, text: str, *, is_negated: bool) -> str:
        """Convert ``path``, ``path == value`` or ``path.#(...)`` on the body."""
        test = _TEST.fullmatch(text) if not _ANY.search(text) or _NAMED.match(text) else None
        named = _NAMED.match(text)
        if named:
            test = _TEST.fullmatch("x" + text[named.end() :])
        if test is None:
            return self._existence(text, is_negated=is_negated)
        path = text[: named.end()] + test["path"][1:].rstrip() if named else test["path"].strip()
        op = "==" if test["op"] == "=" else test["op"]
        place = self._place(path)
        value = _literal(test["value"].strip(), is_pattern=op in _GLOBS)
        if place.parameter:
            return _parameter_test(place.parameter, op, value, is_negated=is_negated)
        element, written, guard = self._element(place, value), self._written(place, value), self._guard(place)
        if op in _GLOBS:
            return _signed(f"{guard}{_matches(element, value, op)}", is_negated=is_negated)
        if guard:
            return _signed(f"{guard}{element} {op} {written}", is_negated=is_negated)
        return f"{element} {_NEGATED[op] if is_negated else op} {written}"

    def _existence(self, text: str, *, is_negated: bool) -> str:
        """Convert ``path`` or ``path.#(...)``."""
        named = _NAMED.match(text)
        some = _ANY.fullmatch(text, named.end() if named else 0)
        if some:
            self.notes.append(_MEANS_ANY.format(text=text))
            test = self._any(text[: named.end()] if named else some["path"], some["test"].strip())
            return _signed(test, is_negated=is_negated)
        place = self._place(text)
        if place.parameter:
            return _signed(f"{_cel_text(place.parameter)} in parameters", is_negated=is_negated)
        return _signed(f"has({self._reference(place.tensor)})", is_negated=is_negated)

    def _any(self, path: str, text: str) -> str:
        """Convert a test that some element passes: ``instances.#(id=="7")``."""
        test = _TEST.fullmatch(text)
        if test is None:
            place = self._place(f"{path}.{text}")
            return f"has({self._reference(place.tensor)})"
        element = test["path"].strip()
        place = self._place(f"{path}.{element}" if element else path)
        if place.parameter or place.indexes:
            raise UntranslatableError("it looks for an element of what is no tensor")
        op = "==" if test["op"] == "=" else test["op"]
        value, known = _literal(test["value"].strip(), is_pattern=op in _GLOBS), self._known(place.tensor)
        guard, reference, written = self._guard(place), self._reference(place.tensor), self._written(place, value)
        if known is not None and known.datatype in FLOATS | INTEGERS and op[0] in "<>" and not isinstance(value, str):
            # Of all elements of all rows, however many.
            return f"{guard}{'max' if op[0] == '>' else 'min'}({reference}) {op} {written}"
        self.is_of_one_row = True
        test_of = _matches("e", value, op) if op in _GLOBS else f"e {op} {written}"
        return f"{guard}{reference}.exists(e, {test_of})"

    def _guard(self, place: JsonPath) -> str:
        known = self._known(place.tensor)
        return f"has({self._reference(place.tensor)}) && " if known is not None and known.is_optional else ""

    def _element(self, place: JsonPath, value: Literal) -> str:
        """One element of a tensor in a condition; a leading index chooses the row."""
        reference, known, indexes = self._reference(place.tensor), self._known(place.tensor), place.indexes
        self.is_of_one_row = True
        if isinstance(value, str) and not any(indexes):
            return f"text({reference})"
        if known is None:
            return reference + "".join(f"[{index}]" for index in indexes or (0,))
        if known.is_batched and indexes:
            if indexes[0] > 0:
                raise UntranslatableError(f"it reads row {indexes[0]}; a condition reads one row")
            indexes = indexes[1:]
        if len(indexes) > len(known.dims):
            raise UntranslatableError(f"'{place.tensor}' has dims {list(known.dims)}, fewer than the path has indexes")
        padded = (*indexes, *(0 for _ in range(len(known.dims) - len(indexes))))
        return reference + "".join(f"[{index}]" for index in padded)

    def _written(self, place: JsonPath, value: Literal) -> str:
        known = self._known(place.tensor)
        is_float = known is not None and known.datatype in ("FP16", "FP32", "FP64", "BF16")
        if is_float and isinstance(value, int) and not isinstance(value, bool):
            return f"{value}.0"
        return _cel(value)


def translate(condition: DraftCondition, body: Body, *, is_negated: bool = False) -> str:
    """CEL that is true if the condition holds, or with ``is_negated`` if it does not.

    ``body`` is what it reads; it records the tensors read and the open questions.
    """
    text = condition.text.strip().replace('\\"', '"')
    body.is_request = condition.is_request
    try:
        return body.translated(text, is_negated=is_negated)
    except UntranslatableError as reason:
        given = f"KServe's condition {text}" if text else "The step's condition"
        body.remarks[:] = [f"{given} is to be written in CEL: {reason}"]
        return f"{'!' if is_negated else ''}CHECK({json.dumps(text)})"


def _indexes(parts: Iterable[str]) -> tuple[int, ...]:
    texts = list(parts)
    if not all(text.isdigit() for text in texts):
        raise UntranslatableError(f"'{'.'.join(texts)}' reaches into an object; a tensor has no fields")
    return tuple(int(text) for text in texts)


def _literal(text: str, *, is_pattern: bool = False) -> Literal:
    try:
        value = json.loads(text)
    except ValueError:
        if not text or not (_PLAIN_PATH.fullmatch(text) or (is_pattern and '"' not in text)):
            raise UntranslatableError(f"the value '{text}' uses what only gjson has") from None
        return text
    if not isinstance(value, (str, int, float)):
        raise UntranslatableError(f"the value {text} is no string, number or boolean")
    return value


def _matches(element: str, pattern: Literal, op: str) -> str:
    """A gjson pattern, with * for any text and ? for any character, as a regular expression."""
    if not isinstance(pattern, str):
        raise UntranslatableError(f"the pattern {pattern} is no text")
    expression = "".join(_WILDCARDS.get(c) or (c if c.isalnum() or c in " _" else f"\\{c}") for c in pattern)
    return f"{'!' if op[0] == '!' else ''}{element}.matches({_cel_text(f'(?s)^{expression}$')})"


def _parameter_test(name: str, op: str, value: Literal, *, is_negated: bool) -> str:
    """A test that is false for an absent parameter, as in gjson."""
    if op in _GLOBS:
        return _signed(_matches(f'get(parameters, {_cel_text(name)}, "")', value, op), is_negated=is_negated)
    if op == "==" and isinstance(value, str) and value:
        return f'get(parameters, {_cel_text(name)}, "") {"!=" if is_negated else "=="} {_cel_text(value)}'
    test = f"{_cel_text(name)} in parameters && parameters[{_cel_text(name)}] {op} {_cel(value)}"
    return _signed(test, is_negated=is_negated)


def _signed(test: str, *, is_negated: bool) -> str:
    if not is_negated:
        return test
    outside, depth = [], 0
    for part in re.split(r'("(?:[^"\\]|\\.)*"?|[()])', test):
        depth += (part == "(") - (part == ")")
        outside += [part] if depth == 0 else []
    if " " in "".join(outside):
        return f"!({test})"
    return test[1:] if test.startswith("!") else f"!{test}"


def _cel(value: Literal) -> str:
    return _cel_text(value) if isinstance(value, str) else json.dumps(value)


def _cel_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
