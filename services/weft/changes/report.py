"""What a replay found: differences by tensor, errors, paths, times by priority."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from weft.base.statistics import LatencyHistogram
from weft.changes.comparison import Comparison, Outcome, compare_answers
from weft_protos import recording_pb2 as pb

_MAX_EXAMPLES = 3
_MAX_EXAMPLE_CHARS = 200
#: Times are told to 1 %, from 1 us to 20 minutes.
_BOUNDS_S = tuple(1e-6 * 1.01**i for i in range(2101))


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
