"""The path of a request through a graph, and how long each step took.

Grammar of the path, the value of the trailing metadata ``x-graph-path``::

    path  = node body
    body  = before steps after  the brackets of the node's kind, from its plan's ``path_form``: root.lid;clf;post
                                or clf=by_language[de] or read=lines*(ocr#57), and lines*() without rows
    steps = step *( ";" step )  in the order in which they started; those of a loop once for each round
    step  = name [ "#" rows ] [ "=" node body ] [ mark ] *( ">" step )
    mark  = "!" | "~" | "^"     "!" it failed, "~" it was cancelled or late, "^" its cache gave an expired answer
    rows                        how many, if rows of a request take different steps, or are those of lists:
                                <tiny#32;base#5>

After ">" follow the fallbacks that were tried: ``bert_de!>xlmr``. Skipped steps and shadows do not appear. A whole
example: ``root.lid;clf=by_language[de];post``. After an error the path ends where the request ended.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from weft.language.path_form import IN_A_ROW, PathForm

#: Trailing metadata that carries the path.
PATH_HEADER = "x-graph-path"
#: Request parameter that requests timings, and response parameter that carries them.
TRACE_PARAMETER = "graph_trace"
#: Response parameter of the last response where a soft step's stream broke off: its path and status.
INCOMPLETE_PARAMETER = "graph_incomplete"
#: gRPC peers drop headers above 8 KiB, of which an error message may take half; a longer path is cut.
MAX_PATH_CHARS = 2000

SKIPPED = "SKIPPED"

_MARKS = {"OK": "", "CANCELLED": "~"}


@dataclass(slots=True, eq=False)
class NodeRecord:
    """One run of a node, or of steps in a row: the started steps, in order; ``watching`` are a ``Side`` each."""

    name: str
    form: PathForm = IN_A_ROW
    steps: "list[StepRecord]" = field(default_factory=list)
    watching: tuple[Any, ...] = ()


class StepRecord:
    """One run of a step; fields that few steps need are class attributes.

    Attributes:
        target, model, version: Of a call; "" if the step is a node.
        start_ns, end_ns: On the runtime's clock.
        status: "OK", "SKIPPED", "CANCELLED", or the gRPC status name of the error: that of the last fallback, if one
            was tried and failed.
        node: The run of the node that the step calls, if any; of several attempts the one that counts.
        attempts: Calls that were started, including retries and hedges; 0 if the plan has neither.
        cached: Whether the answer came from the cache, or from the call of an equal request; None without a cache.
        is_stale: The answer was expired, and given because the action was UNAVAILABLE.
        error: Message of a failure that did not end the request, or has not yet.
        is_missing: It failed, fallbacks included, and is soft: the request goes on without its answer.
        fallbacks: Fallbacks tried after the failure; the last may have answered.
        rows: How many, if rows of a request take different steps, or are those of lists; else 0.
        counts: Other counts of the node around the step, by name; of a call its times at the model's service.
        tried: Replicas of the target that were called, by all attempts; None if there is only one attempt.
    """

    node: NodeRecord | None = None
    attempts: int = 0
    cached: bool | None = None
    is_stale: bool = False
    error: str = ""
    is_missing: bool = False
    fallbacks: NodeRecord | None = None
    rows: int = 0
    responses: int = 0
    counts: Mapping[str, float] = MappingProxyType({})
    tried: list[str] | None = None

    def __init__(
        self, name: str, path: str, start_ns: int, target: str = "", model: str = "", version: str = ""
    ) -> None:
        self.name = name
        self.path = path
        self.start_ns = self.end_ns = start_ns
        self.target = target
        self.model = model
        self.version = version
        self.status = "CANCELLED"

    @property
    def has_answered(self) -> bool:
        """Whether the step, or a fallback of it, gave an answer."""
        if self.status == "OK":
            return True
        return self.fallbacks is not None and self.fallbacks.steps[-1].has_answered


class UsualPath:
    """Caches the path text of runs in which every step answers; the first run writes it.

    Args:
        num_steps: Steps that such a run starts.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._text = ""

    def text_of(self, record: NodeRecord) -> str:
        """Like ``path_text``."""
        if len(record.steps) != self._num_steps:
            return path_text(record)
        for step in record.steps:
            if step.status != "OK" or step.is_stale:
                return path_text(record)
        self._text = self._text or path_text(record)
        return self._text


def path_text(record: NodeRecord) -> str:
    """The path of a graph's run, in printable ASCII."""
    parts: list[str] = [record.name]
    _write_body(record, parts, is_root=True)
    text = "".join(parts)
    if not (text.isascii() and text.isprintable()):
        text = "".join(character if " " <= character <= "~" else "?" for character in text)
    return text if len(text) <= MAX_PATH_CHARS else text[: MAX_PATH_CHARS - 3] + "..."


def trace_text(record: NodeRecord, origin_ns: int) -> str:
    """Describe every step as JSON, the value of the response parameter ``graph_trace``.

    A list with an object for each step; steps of a node follow the step that ran it, fallbacks the step that failed:
    path, target, model, version, start_ms (since ``origin_ns``), ms, status; and where they apply attempts, cached,
    stale, fallback_of (the path of the step that failed), rows, responses, error (its message), and other counts of the
    node around the step.
    """
    return json.dumps(
        [_entry(step, failed, origin_ns) for step, failed in steps_in(record.steps)], separators=(",", ":")
    )


def _entry(step: StepRecord, failed: StepRecord | None, origin_ns: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "path": step.path,
        "target": step.target,
        "model": step.model,
        "version": step.version,
        "start_ms": round((step.start_ns - origin_ns) / 1e6, 3),
        "ms": round((step.end_ns - step.start_ns) / 1e6, 3),
        "status": step.status,
    }
    if step.attempts:
        entry["attempts"] = step.attempts
    if step.cached is not None:
        entry["cached"] = step.cached
    if step.is_stale:
        entry["stale"] = True
    if failed is not None:
        entry["fallback_of"] = failed.path
    if step.rows:
        entry["rows"] = step.rows
    if step.responses:
        entry["responses"] = step.responses
    entry.update(step.counts)
    if step.error:
        entry["error"] = step.error
    return entry


def steps_in(
    steps: Sequence[StepRecord], failed: StepRecord | None = None
) -> Iterator[tuple[StepRecord, StepRecord | None]]:
    """Every step, with the one that it stands in for."""
    for step in steps:
        yield step, failed
        if step.node is not None:
            yield from steps_in(step.node.steps)
        if step.fallbacks is not None:
            yield from steps_in(step.fallbacks.steps, step)


def _write_body(record: NodeRecord, parts: list[str], *, is_root: bool) -> None:
    before, after = record.form.root_brackets if is_root else record.form.brackets
    is_empty = True
    for step in record.steps:
        if step.status == SKIPPED:
            continue
        parts.append(before)
        _write_step(step, parts)
        before = ";"
        is_empty = False
    if is_empty and record.steps and record.form.shows_nothing:
        parts += (before, after)
    elif not is_empty:
        parts.append(after)


def _write_step(step: StepRecord, parts: list[str]) -> None:
    parts.append(step.name)
    if step.rows:
        parts.append(f"#{step.rows}")
    if step.node is not None:
        parts.append("=")
        parts.append(step.node.name)
        _write_body(step.node, parts, is_root=False)
    parts.append("^" if step.is_stale and step.status == "OK" else _MARKS.get(step.status, "!"))
    if step.fallbacks is not None:
        for fallback in step.fallbacks.steps:
            parts.append(">")
            _write_step(fallback, parts)
