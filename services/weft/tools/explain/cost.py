"""How many calls a request may lead to, and how long the limits let it take."""

import math
from dataclasses import dataclass

from weft.tools.explain.entry import ExplainedStep, StepOutcome


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of models, shadows not counted.

    Attributes:
        usual: At most, if nothing fails and nothing is slow.
        worst: With every attempt, hedge and fallback.
        shadows: Copies at most, on top.
    """

    usual: int = 0
    worst: int = 0
    shadows: int = 0


def count_calls(entry: ExplainedStep) -> Calls:
    """Calls of a step or of the root, on the path that calls most."""
    if entry.outcome is StepOutcome.SHADOW:
        inner = _inner_calls(entry)
        return Calls(shadows=inner.worst + inner.shadows)
    if not entry.outcome.can_run:
        return Calls()
    inner = _inner_calls(entry)
    step = entry.step
    below = [count_calls(child) for child in entry.children if _is_fallback(entry, child)]
    factor = math.prod(policy.num_calls for policy in step.policies) if step is not None else 1
    return Calls(
        inner.usual,
        inner.worst * factor + sum(calls.worst for calls in below),
        inner.shadows * factor + sum(calls.shadows for calls in below),
    )


def _inner_calls(entry: ExplainedStep) -> Calls:
    if entry.node is None:
        return Calls(1, 1)
    calls = [count_calls(child) for child in entry.children]
    own = [places for _, places in entry.together]
    usual = [places for has_trouble, places in entry.together if not has_trouble]
    return Calls(
        max((sum(calls[place].usual for place in places) for places in usual), default=0) * entry.num_rounds,
        max((sum(calls[place].worst for place in places) for places in own), default=0) * entry.num_rounds,
        sum(calls[entry.children.index(child)].shadows for child in _inside(entry)) * entry.num_rounds,
    )


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time that the limits allow.

    Attributes:
        ms: Its length; infinite where no limit holds.
        parts: (path, ms) one after another; ms is infinite for a step without limit.
    """

    ms: float = 0.0
    parts: tuple[tuple[str, float], ...] = ()

    def then(self, other: "Span") -> "Span":
        """Both, one after the other."""
        return Span(self.ms + other.ms, self.parts + other.parts)

    def cut(self, limit_ms: float, path: str) -> "Span":
        """The same, if the limit allows it, else the limit."""
        return self if not limit_ms or self.ms <= limit_ms else Span(limit_ms, ((path, limit_ms),))


def longest(entry: ExplainedStep) -> Span:
    """The path that may take longest, by the timeouts of steps and nodes alone."""
    if not entry.outcome.can_run:
        return Span()
    step, node = entry.step, entry.node
    if node is None:
        inner = Span(math.inf, ((entry.path, math.inf),))
    else:
        inner = _inner_span(entry).cut(node.timeout_ms, entry.path)
    if step is not None:
        inner = inner.cut(step.timeout_ms, entry.path)
    for child in entry.children:
        if _is_fallback(entry, child):
            inner = inner.then(longest(child))
    return inner


def _inner_span(entry: ExplainedStep) -> Span:
    """The longest path of steps that start after one another."""
    if entry.node is None:
        return Span()
    description = entry.node.describe()
    spans = {id(child.step): longest(child) for child in _inside(entry)}
    own = [spans.get(id(step), Span()) for step in description.steps]
    after: list[list[int]] = [[] for _ in own]
    for flow in description.flows:
        if flow.source is not None and flow.target is not None:
            after[flow.source].append(flow.target)
    memo: dict[int, Span] = {}

    def from_step(index: int) -> Span:
        if index not in memo:
            memo[index] = own[index].then(_longer([from_step(one) for one in after[index]]))
        return memo[index]

    chain, rounds = _longer([from_step(index) for index in range(len(own))]), entry.num_rounds
    if rounds == 1:
        return chain
    return Span(chain.ms * rounds, (*chain.parts, (f"{rounds - 1} more rounds", chain.ms * (rounds - 1))))


def _longer(spans: list[Span]) -> Span:
    return max(spans, key=lambda span: span.ms, default=Span())


def _inside(entry: ExplainedStep) -> list[ExplainedStep]:
    return [child for child in entry.children if not _is_fallback(entry, child)]


def _is_fallback(entry: ExplainedStep, child: ExplainedStep) -> bool:
    return entry.step is not None and child.step is not None and child.step is entry.step.fallback
