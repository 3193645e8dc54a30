"""What a replay found: differences by tensor, errors, paths, times by priority."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from weft.changes.comparison import Comparison, Outcome, compare_answers
from weft_protos import recording_pb2 as pb

_MAX_EXAMPLES = 3
_MAX_ID_CHARS = 40


class Report:
    """Compares answers of two sides as they come.

    Attributes:
        num_different: Requests whose outputs or status differ; a path that changed alone is none.
        differences: Requests by what differs.
    """

    def __init__(self, labels: Sequence[str], comparison: Comparison) -> None:
        self.labels = list(labels)
        self.num_requests = self.num_different = 0
        self.differences: Counter[str] = Counter()
        self._examples: defaultdict[str, list[str]] = defaultdict(list)
        self._comparison = comparison
        self._cpu_s: defaultdict[str, float] = defaultdict(float)
        self._num_errors = [0, 0]
        self._num_different: Counter[int] = Counter()
        self._ms: defaultdict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def add(self, record: pb.Record, before: Outcome, after: Outcome) -> None:
        """Compare the answers to one request."""
        self.num_requests += 1
        parameter = record.request.parameters.get("priority")
        priority = int(parameter.uint64_param or parameter.int64_param) if parameter is not None else 0
        found = compare_answers(before, after, self._comparison)
        is_different = any(one.what != "path" for one in found)
        self.num_different += is_different
        self._num_different[priority] += is_different
        for place, outcome in enumerate((before, after)):
            self._ms[priority][place].append(outcome.duration_ns / 1e6)
            self._num_errors[place] += outcome.status != "OK"
        for what, text in found:
            self.differences[what] += 1
            if len(self._examples[what]) < _MAX_EXAMPLES:
                self._examples[what].append(
                    f"{record.request.id[:_MAX_ID_CHARS] or f'request {self.num_requests}'}: {text}"
                )

    def add_cpu(self, label: str, cpu_s: float) -> None:
        """Count CPU time of a side."""
        self._cpu_s[label] += cpu_s

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "requests": self.num_requests,
            "different": self.num_different,
            "differences": [
                {"what": what, "requests": count, "examples": self._examples[what]}
                for what, count in self.differences.most_common()
            ],
            "sides": [
                {
                    "name": label,
                    "errors": errors,
                    "cpu_ms_per_request": self._cpu_s[label] * 1e3 / self.num_requests
                    if label in self._cpu_s
                    else None,
                }
                for label, errors in zip(self.labels, self._num_errors, strict=True)
            ],
            "priorities": [
                {
                    "priority": priority,
                    "requests": len(sides[0]),
                    "different": self._num_different[priority],
                    "p50_ms": [float(np.percentile(side, 50)) for side in sides],
                    "p99_ms": [float(np.percentile(side, 99)) for side in sides],
                }
                for priority, sides in sorted(self._ms.items())
            ],
        }

    def text(self) -> str:
        """Tables that are Markdown, and lined up for a terminal."""
        facts = self.facts()
        before, after = self.labels
        found = [(one["what"], f"{one['requests']:,}", one["examples"][0]) for one in facts["differences"]]
        cpu = [one["cpu_ms_per_request"] for one in facts["sides"]]
        sides = [
            ("errors", *(f"{one['errors']:,}" for one in facts["sides"])),
            ("CPU ms a request", *("-" if one is None else f"{one:.2f}" for one in cpu)),
        ]
        for one in facts["priorities"]:
            about = f", priority {one['priority']} ({one['requests']:,})" if len(facts["priorities"]) > 1 else ""
            sides += [(f"{name} ms{about}", *(f"{ms:.2f}" for ms in one[f"{name}_ms"])) for name in ("p50", "p99")]
        lines = [f"**{self.num_different:,} of {self.num_requests:,} answers differ: {before} -> {after}**", ""]
        if found:
            lines += [*_table(("differs", "requests", "for example"), found), ""]
        return "\n".join([*lines, *_table(("", before, after), sides)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        yield f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
