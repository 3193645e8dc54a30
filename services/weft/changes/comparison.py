"""Compares answers, tensor by tensor, and sums up: differences, errors, paths, times by priority."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from weft.base.core import InferResult
from weft.base.statistics import LatencyHistogram
from weft.base.tensors import FLOATS, WireTensor, decode, joined, shown
from weft.v2.protocol.recording import results_of_record
from weft_protos import recording_pb2 as pb

#: How tensors are compared: bit for bit; floats within a tolerance; the place of the largest value of each row; strings
#: without regard to white space; not at all.
RULES: Final = ("exact", "close", "top1", "text", "ignore")
_MAX_EXAMPLES = 3
_MAX_EXAMPLE_CHARS = 200
#: Times are told to 1 %, from 1 us to 20 minutes.
_BOUNDS_S = tuple(1e-6 * 1.01**i for i in range(2101))


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


class Report:
    """Compares answers of two sides as they come.

    Attributes:
        num_different: Requests whose outputs or status differ; a changed path alone is no difference.
        differences: Requests by what differs.
        cpu_s: By side; missing if unknown.
    """

    def __init__(self, labels: Sequence[str], comparison: Comparison) -> None:
        self.num_requests = self.num_different = 0
        self.differences: Counter[str] = Counter()
        self.cpu_s: defaultdict[int, float] = defaultdict(float)
        self._labels, self._comparison = labels, comparison
        self._num_errors = [0, 0]
        self._examples: defaultdict[str, list[str]] = defaultdict(list)
        self._different: Counter[int] = Counter()
        self._times: defaultdict[int, list[LatencyHistogram]] = defaultdict(
            lambda: [LatencyHistogram(_BOUNDS_S), LatencyHistogram(_BOUNDS_S)]
        )

    def add(self, record: pb.Record, before: Outcome, after: Outcome) -> None:
        """Compare the answers to one request."""
        self.num_requests += 1
        given = record.request.parameters.get("priority")
        priority = 0 if given is None else int(given.uint64_param or given.int64_param)
        for place, outcome in enumerate((before, after)):
            self._times[priority][place].observe(outcome.duration_ns / 1e9)
            self._num_errors[place] += outcome.status != "OK"
        found = compare_answers(before, after, self._comparison)
        is_different = any(what != "path" for what, _ in found)
        self.num_different += is_different
        self._different[priority] += is_different
        for what, text in found:
            self.differences[what] += 1
            if len(self._examples[what]) < _MAX_EXAMPLES:
                example = f"{record.request.id or f'request {self.num_requests}'}: {text}"
                self._examples[what].append(example[:_MAX_EXAMPLE_CHARS])

    def facts(self) -> dict[str, Any]:
        """All of it; pairs are of the two sides."""
        return {
            "sides": self._labels,
            "requests": self.num_requests,
            "different": self.num_different,
            "differences": {
                what: {"requests": count, "examples": self._examples[what]}
                for what, count in self.differences.most_common()
            },
            "errors": self._num_errors,
            "cpu_ms": [
                self.cpu_s[place] / self.num_requests * 1e3 if place in self.cpu_s else None for place in (0, 1)
            ],
            "priorities": {
                priority: {"requests": sides[0].count, "different": self._different[priority]}
                | {f"p{share}_ms": [side.quantile(share / 100) * 1e3 for side in sides] for share in (50, 99)}
                for priority, sides in sorted(self._times.items())
            },
        }

    def text(self, *, is_markdown: bool) -> str:
        """The facts as lines, or as a list of Markdown."""
        facts, mark = self.facts(), "**" if is_markdown else ""
        before, after = self._labels
        lines = [f"{mark}{self.num_different:,} of {self.num_requests:,} answers differ{mark}: {before} -> {after}"]
        for what, one in facts["differences"].items():
            lines.append(f"{what}: {one['requests']:,} differ, for example {one['examples'][0]}")
        cpu = ["unknown" if cpu_ms is None else f"{cpu_ms:.2f}" for cpu_ms in facts["cpu_ms"]]
        lines += ["errors: {:,} -> {:,}".format(*facts["errors"]), f"CPU ms a request: {cpu[0]} -> {cpu[1]}"]
        for priority, one in facts["priorities"].items():
            about = f", priority {priority} ({one['different']:,} of {one['requests']:,} differ)" if priority else ""
            lines += ["{} ms{}: {:.2f} -> {:.2f}".format(name, about, *one[f"{name}_ms"]) for name in ("p50", "p99")]
        return f"\n{'- ' if is_markdown else '  '}".join(lines)
