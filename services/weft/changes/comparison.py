"""Compares two answers to one request, tensor by tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from weft.base.core import InferResult
from weft.base.tensors import FLOATS, WireTensor, decode, joined, shown
from weft.v2.protocol.recording import results_of_record
from weft_protos import recording_pb2 as pb

#: How tensors are compared: bit for bit; floats within a tolerance; the place of the largest value of each row; strings
#: without regard to white space; not at all.
RULES: Final = ("exact", "close", "top1", "text", "ignore")


@dataclass(slots=True)
class Outcome:
    """What came of one request; ``results`` are its responses."""

    results: list[InferResult] = field(default_factory=list)
    status: str = "OK"
    message: str = ""
    path: str = ""
    duration_ns: int = 0


def outcome_of(record: pb.Record) -> Outcome:
    """The recorded one."""
    status = record.status or "OK"
    return Outcome(results_of_record(record), status, record.message, record.path, record.duration_ns)


@dataclass(frozen=True)
class Comparison:
    """How answers are compared.

    Attributes:
        rules: Of ``RULES``, by name of an output; of others floats are compared by "close" and the rest by "exact".
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    rtol: float = 1e-5
    atol: float = 1e-5


DEFAULT: Final = Comparison()


class Difference(NamedTuple):
    """``what``: "output NAME", "status" or "path"; ``text``: from what to what."""

    what: str
    text: str


def compare_answers(before: Outcome, after: Outcome, comparison: Comparison = DEFAULT) -> list[Difference]:
    """What differs; [] if the answers agree, or a client left before the first had all.

    Responses of a stream are compared one by one, but strings as the text that they are together, unless their rule is
    "exact": a server may cut it elsewhere.
    """
    found = list[Difference]()
    if before.status == "CANCELLED":
        return found
    if before.path and after.path and before.path != after.path:
        found.append(Difference("path", f"{before.path} -> {after.path}"))
    codes = [[side.status, *(one.error.code for one in side.results if one.error)] for side in (before, after)]
    if codes[0] != codes[1]:
        messages = [f": {side.message}" if side.message else "" for side in (before, after)]
        texts = (", ".join(of) + message for of, message in zip(codes, messages, strict=True))
        found.append(Difference("status", " -> ".join(texts)))
    if (before.status, after.status) != ("OK", "OK"):
        return found
    for name in dict.fromkeys(name for side in (before, after) for one in side.results for name in one.outputs):
        rule = comparison.rules.get(name, "")
        sides = [[one.outputs[name] for one in side.results if name in one.outputs] for side in (before, after)]
        is_text = rule in ("", "text") and all(one.datatype == "BYTES" for side in sides for one in side)
        if is_text and (len(before.results), len(after.results)) != (1, 1):
            sides = [[joined(side)] for side in sides]
        text = f"in {len(sides[0])} responses -> in {len(sides[1])}"
        if len(sides[0]) == len(sides[1]):
            faults = (_fault(one, other, rule, comparison) for one, other in zip(*sides, strict=True))
            text = next(filter(None, faults), "")
        if text and rule != "ignore":
            found.append(Difference(f"output {name}", text))
    return found


def _fault(one: WireTensor, other: WireTensor, rule: str, comparison: Comparison) -> str:
    """How two tensors differ; "" if they agree."""
    if one == other or rule == "ignore":
        return ""
    if one[:2] != other[:2]:
        return f"{one.datatype}{list(one.shape)} -> {other.datatype}{list(other.shape)}"
    first, second = decode(one), decode(other)
    is_close = rule in ("", "close") and one.datatype in FLOATS
    if rule == "top1":
        first, second = np.argmax(first, axis=-1), np.argmax(second, axis=-1)
    elif is_close:
        first, second = first.astype(np.float64), second.astype(np.float64)
    elif rule == "text" and one.datatype == "BYTES":
        first, second = (np.array([b" ".join(text.split()) for text in side.flat], object) for side in (first, second))
    first, second = first.ravel(), second.ravel()
    limits = comparison.rtol, comparison.atol
    same = np.isclose(first, second, *limits, equal_nan=True) if is_close else first == second
    places = np.flatnonzero(~same)
    more = f", {len(places)} of {len(first)} elements" if len(first) > 1 else ""
    return f"{_shown(first[places[0]])} -> {_shown(second[places[0]])}{more}" if len(places) else ""


def _shown(value: Any) -> str:
    return shown(value.decode(errors="replace")) if isinstance(value, bytes) else f"{value:.6g}"
