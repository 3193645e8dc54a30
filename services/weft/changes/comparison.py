"""Compares two answers to one request, tensor by tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from weft.base.core import InferResult
from weft.base.tensors import FLOATS, WireTensor, decode, split_bytes
from weft.v2.protocol.recording import results_of_record
from weft_protos import recording_pb2 as pb

#: How tensors of one name are compared: bit for bit; floats within a tolerance; the place of the largest value of each
#: row; strings without regard to white space, those of a stream as one; not at all.
RULES: Final = ("exact", "close", "top1", "text", "ignore")
_MAX_SHOWN: Final = 60


@dataclass(slots=True)
class Outcome:
    """What came of one request; ``results`` are its responses."""

    results: list[InferResult] = field(default_factory=list)
    status: str = "OK"
    message: str = ""
    path: str = ""
    duration_ns: int = 0


@dataclass(frozen=True)
class Comparison:
    """How answers are compared.

    Attributes:
        rules: By name of an output, of ``RULES``; of others floats are compared by "close" and the rest by "exact".
    """

    rules: Mapping[str, str] = field(default_factory=dict)
    rtol: float = 1e-5
    atol: float = 1e-5


class Difference(NamedTuple):
    """``what``: "output NAME", "status", "responses" or "path"; ``text``: from what to what."""

    what: str
    text: str


def outcome_of(record: pb.Record) -> Outcome:
    """The recorded one."""
    status = record.status or "OK"
    return Outcome(results_of_record(record), status, record.message, record.path, record.duration_ns)


def compare_answers(before: Outcome, after: Outcome, comparison: Comparison = Comparison()) -> list[Difference]:
    """What differs; [] if the answers agree.

    Responses of a stream are compared one by one, but strings without a rule as the text that they are together: a
    server may cut it otherwise.
    """
    found = []
    if before.path and after.path and before.path != after.path:
        found.append(Difference("path", f"{before.path} -> {after.path}"))
    if before.status != after.status:
        found.append(Difference("status", f"{_shown_status(before)} -> {_shown_status(after)}"))
    if before.status != "OK" or after.status != "OK":
        return found
    is_stream = len(before.results) != 1 or len(after.results) != 1
    names = dict.fromkeys(name for side in (before, after) for result in side.results for name in result.outputs)
    for name in names:
        rule = comparison.rules.get(name, "")
        sides = [
            [result.outputs[name] for result in side.results if name in result.outputs] for side in (before, after)
        ]
        if is_stream and rule in ("", "text") and all(one.datatype == "BYTES" for side in sides for one in side):
            sides = [[WireTensor("BYTES", (), b"".join(one.data for one in side))] for side in sides]
            text = _text_fault(*(b"".join(split_bytes(side[0].data)) for side in sides), rule)
        elif len(sides[0]) != len(sides[1]):
            text = f"in {len(sides[0])} responses -> in {len(sides[1])}"
        else:
            pairs = zip(*sides, strict=True)
            text = next((fault for one, other in pairs if (fault := tensor_fault(one, other, rule, comparison))), "")
        if text and rule != "ignore":
            found.append(Difference(f"output {name}", text))
    return found


def tensor_fault(one: WireTensor, other: WireTensor, rule: str, comparison: Comparison) -> str:
    """How two tensors differ by a rule; "" if they agree."""
    rule = rule or ("close" if one.datatype in FLOATS else "exact")
    if one == other or rule == "ignore":
        return ""
    if one[:2] != other[:2]:
        return f"{one.datatype}{list(one.shape)} -> {other.datatype}{list(other.shape)}"
    first, second = decode(one).ravel(), decode(other).ravel()
    if rule == "top1":
        rows = (-1, one.shape[-1] if one.shape else 1)
        return _changed(*(np.argmax(side.reshape(rows), axis=1) for side in (first, second)))
    if rule == "close" and one.datatype in FLOATS:
        first, second = first.astype(np.float64), second.astype(np.float64)
        if np.allclose(first, second, comparison.rtol, comparison.atol, equal_nan=True):
            return ""
    if rule == "text" and one.datatype == "BYTES":
        first, second = (np.array([b" ".join(text.split()) for text in side], object) for side in (first, second))
    return _changed(first, second)


def _changed(first: Any, second: Any) -> str:
    """The first elements that differ, and how many do; "" if none does."""
    (places,) = np.nonzero(first != second)
    if not len(places):
        return ""
    more = f", {len(places)} of {len(first)} elements" if len(first) > 1 else ""
    return f"{_shown(first[places[0]])} -> {_shown(second[places[0]])}{more}"


def _text_fault(first: bytes, second: bytes, rule: str) -> str:
    if first == second or (rule == "text" and first.split() == second.split()):
        return ""
    begin = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))  # noqa: B905
    return f"from byte {begin}: {_shown(first[begin:])} -> {_shown(second[begin:])}"


def _shown(value: Any) -> str:
    text = repr(value.decode(errors="replace")) if isinstance(value, bytes) else f"{value:.6g}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _shown_status(outcome: Outcome) -> str:
    return f"{outcome.status}: {outcome.message[:_MAX_SHOWN]}" if outcome.message else outcome.status
