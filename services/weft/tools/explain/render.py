"""The explained steps, their worst-case calls and times, and both as text or JSON."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

from weft.language.description import counted, policy_texts, target_text, value_texts
from weft.language.plan import NodePlan, StepPlan


class StepOutcome(Enum):
    """Outcome of a step, given the outcome of the node around it."""

    RUNS = "runs"
    MAYBE = "may run"
    SKIPPED = "skipped"
    PRUNED = "pruned"
    FAILS = "fails"
    ON_ERROR = "on error"
    SHADOW = "shadow"

    @property
    def can_run(self) -> bool:
        """Whether its call counts in the worst case."""
        return self in (StepOutcome.RUNS, StepOutcome.MAYBE, StepOutcome.FAILS, StepOutcome.ON_ERROR)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An output of the graph that the answer lacks, or may lack if ``depends_on`` is given."""

    name: str
    depends_on: tuple[str, ...] = ()


@dataclass(slots=True)
class ExplainedStep:
    """One step, or the root node.

    Attributes:
        path: For example ``root/clf[de]``.
        target: ``bert_de@3``, ``node by_language``, ``graph inner/7``.
        kind: "model" or the kind of the node.
        why: Reasons for the outcome.
        depends_on: Unknown tensors that decide it: ``LANG of lid -> lang_id``.
        decisions: How the node inside chooses or combines.
        notes: Policies and softness.
        left_out: Of the root.
        may_fail: Errors that unknown values may lead to.
        failure: Its certain error, ``INVALID_ARGUMENT: ...`` as the client would see it; "" if there is none.
        deadline_ms: Its time limit; None without one.
        num_rounds: Most rounds of a loop.
        stream: Decoupled step for each of whose responses it runs once; "" for none.
        each: What the steps inside run once for, ``chunk of CROPS``; "" if that is the request.
        children: The steps inside, and its fallbacks.
        together: For each possible path, the indexes in ``children`` of steps that call something in one request, and
            whether a call fails or is late on it.
        step, node: The plan; the root has no step, a call of a model has no node.
    """

    name: str
    path: str
    target: str
    kind: str
    outcome: StepOutcome = StepOutcome.RUNS
    why: list[str] = field(default_factory=list)
    depends_on: list[str] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    may_fail: list[str] = field(default_factory=list)
    failure: str = ""
    deadline_ms: float | None = None
    num_rounds: int = 1
    stream: str = ""
    each: str = ""
    children: "list[ExplainedStep]" = field(default_factory=list)
    together: list[tuple[bool, frozenset[int]]] = field(default_factory=list)
    step: StepPlan | None = None
    node: NodePlan | None = None

    @classmethod
    def of(cls, step: StepPlan, outcome: StepOutcome, why: Iterable[str] = ()) -> "ExplainedStep":
        """Create the entry of a step."""
        kind = step.action.kind if isinstance(step.action, NodePlan) else "model"
        return cls(step.name, step.path, target_text(step.action), kind, outcome, list(why), step=step)

    def noted(self, node: NodePlan) -> "ExplainedStep":
        """A copy with notes on the policies of the step, one of ``node``."""
        if self.step is not None:
            step = self.step
            soft = ["soft: the request goes on without it"] if step.is_soft else []
            waits = node.describe().waits_of(node.steps.index(step)) if step in node.steps else []
            self.notes = [*waits, *soft, *value_texts(step, node), *policy_texts(step)]
        return self


def make_unsure(entries: Iterable[ExplainedStep], depends_on: str) -> None:
    """Mark steps that would run as uncertain, because something else may end the request first."""
    for entry in entries:
        if entry.outcome is StepOutcome.RUNS:
            entry.outcome = StepOutcome.MAYBE
            entry.depends_on.append(depends_on)


@dataclass(frozen=True, slots=True)
class Calls:
    """Most calls: if nothing fails or is slow; with every retry, hedge and fallback; of shadows."""

    usual: int = 0
    worst: int = 0
    shadows: int = 0


def count_calls(entry: ExplainedStep) -> Calls:
    """Calls of a step or of the root, on the path with the most calls."""
    if entry.outcome is StepOutcome.SHADOW:
        inner = _inner_calls(entry)
        return Calls(shadows=inner.worst + inner.shadows)
    if not entry.outcome.can_run:
        return Calls()
    inner = _inner_calls(entry)
    below = [count_calls(child) for child in entry.children if _is_fallback(entry, child)]
    factor = math.prod(policy.num_calls for policy in entry.step.policies) if entry.step is not None else 1
    return Calls(
        inner.usual,
        inner.worst * factor + sum(calls.worst for calls in below),
        inner.shadows * factor + sum(calls.shadows for calls in below),
    )


def _inner_calls(entry: ExplainedStep) -> Calls:
    if entry.node is None:
        return Calls(1, 1)
    calls = [count_calls(child) for child in entry.children]
    usual = [sum(calls[at].usual for at in places) for has_trouble, places in entry.together if not has_trouble]
    worst = [sum(calls[at].worst for at in places) for _, places in entry.together]
    shadows = sum(
        one.shadows for one, child in zip(calls, entry.children, strict=True) if not _is_fallback(entry, child)
    )
    rounds = entry.num_rounds
    return Calls(max(usual, default=0) * rounds, max(worst, default=0) * rounds, shadows * rounds)


@dataclass(frozen=True, slots=True)
class Span:
    """A duration allowed by the limits, infinite without one, and its parts (path, ms) in order."""

    ms: float = 0.0
    parts: tuple[tuple[str, float], ...] = ()

    def then(self, other: "Span") -> "Span":
        """Both, one after the other."""
        return Span(self.ms + other.ms, self.parts + other.parts)

    def cut(self, limit_ms: float, path: str) -> "Span":
        """Limit the duration."""
        return self if not limit_ms or self.ms <= limit_ms else Span(limit_ms, ((path, limit_ms),))


def longest(entry: ExplainedStep) -> Span:
    """The longest path by the timeouts of steps and nodes."""
    if not entry.outcome.can_run:
        return Span()
    step, node = entry.step, entry.node
    if node is None:
        inner = Span(math.inf, ((entry.path, math.inf),))
    else:
        inner = _inner_span(entry, node).cut(node.timeout_ms, entry.path)
    if step is not None:
        inner = inner.cut(step.timeout_ms, entry.path)
    for child in entry.children:
        if _is_fallback(entry, child):
            inner = inner.then(longest(child))
    return inner


def _inner_span(entry: ExplainedStep, node: NodePlan) -> Span:
    """The longest path of steps that run after one another."""
    description = node.describe()
    spans = {id(child.step): longest(child) for child in entry.children if not _is_fallback(entry, child)}
    after: list[list[int]] = [[] for _ in description.steps]
    for flow in description.flows:
        if flow.source is not None and flow.target is not None:
            after[flow.source].append(flow.target)

    @cache
    def from_step(index: int) -> Span:
        own = spans.get(id(description.steps[index]), Span())
        return own.then(_longer([from_step(one) for one in after[index]]))

    chain, rounds = _longer([from_step(index) for index in range(len(after))]), entry.num_rounds
    if rounds == 1:
        return chain
    return Span(chain.ms * rounds, (*chain.parts, (f"{rounds - 1} more rounds", chain.ms * (rounds - 1))))


def _longer(spans: list[Span]) -> Span:
    return max(spans, key=lambda span: span.ms, default=Span())


def _is_fallback(entry: ExplainedStep, child: ExplainedStep) -> bool:
    return entry.step is not None and child.step is not None and child.step is entry.step.fallback


_MARKS = {
    StepOutcome.RUNS: "+",
    StepOutcome.MAYBE: "?",
    StepOutcome.SKIPPED: "-",
    StepOutcome.PRUNED: "-",
    StepOutcome.FAILS: "!",
    StepOutcome.ON_ERROR: "~",
    StepOutcome.SHADOW: "~",
}
_NAMED = (StepOutcome.SKIPPED, StepOutcome.PRUNED, StepOutcome.FAILS, StepOutcome.ON_ERROR)
_MAX_PATHS = 3
_MAX_CHARS = 200
_LEGEND = "+ runs   ? may run   - does not   ! fails   ~ after a failure, or a copy"


def render_text(entry: ExplainedStep, num_rows: int | None) -> str:
    """The tree of steps, then worst-case calls and time."""
    batch = "" if num_rows is None else f"  batch of {counted(num_rows, 'row')}"
    lines = [f"{entry.target}{batch}", *_lines(entry, "", "", is_root=True), "", _LEGEND]
    if entry.failure:
        lines.append(f"the request fails: {entry.failure}")
    lines += [f"calls at most: {calls_text(entry)}", f"time at most: {time_text(entry)}"]
    return "\n".join(lines) + "\n"


def calls_text(entry: ExplainedStep) -> str:
    """``2, 4 with every retry, hedge and fallback``: the most calls."""
    calls = count_calls(entry)
    worst = f", {calls.worst} with every retry, hedge and fallback" if calls.worst != calls.usual else ""
    copies = f", and {calls.shadows} for shadows" if calls.shadows else ""
    return f"{calls.usual}{worst}{copies}{_each(entry)}"


def time_text(entry: ExplainedStep) -> str:
    """The effective time limit, and the path that may use it up."""
    return f"{_time_text(entry)}{_each(entry)}"


def _each(entry: ExplainedStep) -> str:
    units = dict.fromkeys(_units(entry))
    return f", with one {' and one '.join(units)}" if units else ""


def _units(entry: ExplainedStep) -> Iterator[str]:
    """What steps run once for, each, where only the data says how many there are."""
    if entry.outcome.can_run:
        yield from filter(None, (entry.stream and f"response of {entry.stream}", entry.each))
        for child in entry.children:
            yield from _units(child)


def _lines(entry: ExplainedStep, head: str, indent: str, *, is_root: bool = False) -> Iterator[str]:
    what = entry.kind if is_root else f"-> {entry.target}"
    kind = f" [{entry.kind}]" if not is_root and entry.kind != "model" else ""
    outcome = entry.outcome.value if entry.outcome in _NAMED else ""
    reasons = ": ".join(filter(None, (outcome, "; ".join(entry.why))))
    mark = "" if is_root and entry.outcome is StepOutcome.RUNS else f"{_MARKS[entry.outcome]} "
    yield _cut(f"{head}{mark}{entry.name} {what}{kind}{'  ' * bool(reasons)}{reasons}")
    bar = f"{indent}{'│' if entry.children else ' '}    "
    for text in _details(entry, is_root=is_root):
        yield _cut(f"{bar}{text}")
    for child in entry.children:
        is_last = child is entry.children[-1]
        yield from _lines(child, indent + ("└─ " if is_last else "├─ "), indent + ("   " if is_last else "│  "))


def _details(entry: ExplainedStep, *, is_root: bool) -> Iterator[str]:
    yield from entry.decisions
    if entry.depends_on:
        yield f"? depends on {', '.join(entry.depends_on)}"
    for one in entry.left_out:
        if one.depends_on:
            yield f"? output {one.name} may be left out: depends on {', '.join(one.depends_on)}"
        else:
            yield f"output {one.name} is left out"
    yield from (f"may fail: {text}" for text in entry.may_fail)
    notes = list(entry.notes)
    own = max(entry.step.timeout_ms if entry.step is not None else 0, entry.node.timeout_ms if entry.node else 0)
    if entry.deadline_ms is not None and (is_root or 0 < entry.deadline_ms < own):
        notes.append(f"at most {entry.deadline_ms:g} ms{'' if is_root else ' are left by what is around it'}")
    if notes:
        yield "; ".join(notes)


def _cut(line: str) -> str:
    """Shorten a line to the screen; JSON has all of it."""
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…"


def _time_text(entry: ExplainedStep) -> str:
    span, limit = longest(entry), entry.deadline_ms
    if not span.parts:
        return "0 ms: no step runs"
    if math.isinf(span.ms):
        endless = [path for path, ms in span.parts if math.isinf(ms)]
        more = f" and {len(endless) - _MAX_PATHS} more" if len(endless) > _MAX_PATHS else ""
        reason = f"{', '.join(endless[:_MAX_PATHS])}{more} without timeout"
    else:
        reason = " + ".join(f"{path} {ms:g} ms" for path, ms in span.parts)
    if limit is not None and limit < span.ms:
        return f"{limit:g} ms, the deadline; the longest path: {reason}"
    return f"no limit: {reason}" if math.isinf(span.ms) else f"{span.ms:g} ms: {reason}"


def render_json(entry: ExplainedStep, num_rows: int | None) -> str:
    """The same as one object."""
    found = {"graph": entry.target, "num_rows": num_rows, **costs(entry), "root": _as_json(entry)}
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def costs(entry: ExplainedStep) -> dict[str, Any]:
    """The most calls and time, as JSON has them."""
    calls, span = count_calls(entry), longest(entry)
    bounds = [ms for ms in (span.ms, entry.deadline_ms) if ms is not None and not math.isinf(ms)]
    return {
        "num_calls": calls.usual,
        "num_calls_worst": calls.worst,
        "num_shadow_calls": calls.shadows,
        "max_ms": min(bounds, default=None),
        "longest_path": [{"path": path, "ms": None if math.isinf(ms) else ms} for path, ms in span.parts],
    }


def _as_json(entry: ExplainedStep) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": entry.name,
        "path": entry.path,
        "target": entry.target,
        "kind": entry.kind,
        "fate": entry.outcome.value,
        "why": entry.why,
        "depends_on": entry.depends_on,
        "stream": entry.stream or None,
        "each": entry.each or None,
        "decisions": entry.decisions,
        "policies": entry.notes,
        "deadline_ms": entry.deadline_ms,
        "error": entry.failure or None,
        "left_out": [{"output": one.name, "depends_on": list(one.depends_on)} for one in entry.left_out],
        "possible_errors": entry.may_fail,
        "steps": [_as_json(child) for child in entry.children],
    }
    return {key: value for key, value in found.items() if value not in (None, [])}
