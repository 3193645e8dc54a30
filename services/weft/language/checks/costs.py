"""Cost of one request: number of calls after retries (G022), and sum of timeouts along a path (G021)."""

from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

from weft.language.plan import GraphPlan, NodePlan, StepPlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition, StepDefinition

#: More calls than this are warned of.
MAX_CALLS = 4


class _Calls(NamedTuple):
    """Number of calls and its derivation: "" for one call, else a product or sum."""

    total: int = 1
    text: str = ""


class _Span(NamedTuple):
    """Longest time of a path, with the shares of its steps; a lower bound if a step has no timeout."""

    total_ms: int = 0
    parts: tuple[str, ...] = ()
    is_bounded: bool = True

    def then(self, other: "_Span") -> "_Span":
        return _Span(self.total_ms + other.total_ms, self.parts + other.parts, self.is_bounded and other.is_bounded)

    def within(self, limit_ms: int, path: str) -> "_Span":
        """The same within a step or node limited to ``limit_ms``; 0: no limit."""
        if not limit_ms or (self.is_bounded and self.total_ms <= limit_ms):
            return self
        return _Span(limit_ms, (f"{path} ({limit_ms} ms)",))


def check_amplification(file: GraphFile, plan: GraphPlan, report: GraphReport) -> None:
    """Warn of steps that may become more than ``MAX_CALLS`` calls, at the outermost step that multiplies.

    Attempts and hedges multiply, also with those of the nodes and graphs inside; a fallback adds its own. Of the steps
    of a node the worst counts. Nodes of other graphs count, but are reported when those graphs are compiled.
    """
    _CostChecker(file, report).check_calls(plan.root, file.nodes[plan.root.name])


def check_latency(file: GraphFile, plan: GraphPlan, report: GraphReport) -> None:
    """Warn if the timeouts of HARD steps on one path exceed the timeout of the graph, node or step around them.

    A step counts once, because its attempts share a deadline; its fallback counts too, because it has its own. Of
    parallel steps and of alternatives the longest counts, of a loop one round. SOFT steps and shadows do not count.
    Nodes of other graphs count, but are reported when those graphs are compiled.
    """
    checker = _CostChecker(file, report)
    span = checker.node_span(plan.root, file.nodes.get(plan.root.name))
    checker.compare(span, plan.timeout_ms, f"graph '{file.name}'", "policy")


class _CostChecker:
    def __init__(self, file: GraphFile, report: GraphReport) -> None:
        self._file = file
        self._report = report
        self._reported: set[str] = set()

    def check_calls(self, plan: NodePlan, node: NodeDefinition) -> None:
        definitions = _definitions(node)
        for step in (*plan.steps, *plan.shadows):
            definition = definitions[step.name]
            calls = self._step_calls(step, node, definition)
            if calls.total <= MAX_CALLS:
                continue
            is_factor = any(policy.num_calls > 1 for policy in step.policies) or step.fallback is not None
            if isinstance(step.action, NodePlan) and not is_factor and not step.action.graph:
                self.check_calls(step.action, self._file.nodes[definition.message.node])
                continue
            text = (
                f"when models fail, one request may become {calls.total} calls: {calls.text}; more than {MAX_CALLS} "
                "make an overload worse, so retry at one level, or fewer times"
            )
            self._report.warning("G022", self._file, definition.path, text)

    def _step_calls(self, plan: StepPlan, node: NodeDefinition | None, step: StepDefinition | None) -> _Calls:
        inner = _Calls()
        if isinstance(plan.action, NodePlan):  # its worst step, or the model that combines after these
            target = self._inside(plan.action, step)
            definitions = _definitions(target)
            steps = (*plan.action.steps, *plan.action.customs)
            calls = [self._step_calls(one, target, definitions.get(one.name)) for one in steps]
            inner = max(calls, key=lambda one: one.total, default=_Calls())
        factors = []
        count = inner.total
        for policy in plan.policies:
            if policy.num_calls > 1:
                count *= policy.num_calls
                factors.append(f"{policy.calls_text(plan.path)}{self._place(policy.field, node, step)}")
        if inner.text:
            factors.append(inner.text)
        text = " x ".join(f"({one})" if " + " in one and len(factors) > 1 else one for one in factors)
        if plan.fallback is None:
            return _Calls(count, text)
        fallback = self._step_calls(plan.fallback, node, step.fallback if step else None)
        return _Calls(
            count + fallback.total,
            f"{text or f'1 call of {plan.path}'} + {fallback.text or f'1 call of its fallback {plan.fallback.name!r}'}",
        )

    def _inside(self, plan: NodePlan, step: StepDefinition | None) -> NodeDefinition | None:
        """Definition of the node that a step runs; None in another graph."""
        return self._file.nodes.get(step.message.node) if step and not plan.graph else None

    def _place(self, field: str, node: NodeDefinition | None, step: StepDefinition | None) -> str:
        """Place of the setting: at the step, else the node, else the graph."""
        if node is None or step is None:
            return ""
        paths = (f"{step.path}.policy.{field}", f"{node.path}.policy.{field}", f"policy.{field}")
        path = next((path for path in paths if path in self._file.positions), "")
        return f" ({self._file.place(path)})" if path else ""

    def node_span(self, plan: NodePlan, node: NodeDefinition | None) -> _Span:
        """The longest path of HARD steps through a node; ``node`` is None in another graph."""
        definitions = _definitions(node)
        spans = [
            _Span() if step.is_soft or step.shadow else self._step_span(step, definitions.get(step.name))
            for step in plan.steps
        ]
        span = _longest_path(plan.followers(), spans)
        span = span.then(_longest([self._step_span(custom, None) for custom in plan.customs]))
        if node is not None:
            self.compare(span, node.message.policy.timeout_ms, f"node '{plan.name}'", f"{node.path}.policy")
        return span.within(plan.timeout_ms, plan.path)

    def _step_span(self, plan: StepPlan, step: StepDefinition | None) -> _Span:
        span = _Span(is_bounded=False)
        if isinstance(plan.action, NodePlan):
            span = self.node_span(plan.action, self._inside(plan.action, step))
            if step is not None:
                self.compare(span, plan.timeout_ms, f"step '{plan.name}'", f"{step.path}.policy")
        span = span.within(plan.timeout_ms, plan.path)
        if plan.fallback is None:
            return span
        return span.then(self._step_span(plan.fallback, step.fallback if step else None))

    def compare(self, span: _Span, limit_ms: int, owner: str, path: str) -> None:
        """Warn if the path may take longer than ``limit_ms``, once for each place."""
        if not 0 < limit_ms < span.total_ms or path in self._reported:
            return
        self._reported.add(path)
        if len(span.parts) > 1:
            text = (
                f"by their 'timeout_ms', {' -> '.join(span.parts)} may take {span.total_ms} ms one after another, but "
                f"{owner} has {limit_ms} ms, so the last may be cut short; give {owner} more or the steps less"
            )
        else:
            text = (
                f"{span.parts[0]} has more time by its 'timeout_ms' than {owner} around it, {limit_ms} ms, so its own "
                f"limit is never reached; give {owner} more or it less"
            )
        self._report.warning("G021", self._file, f"{path}.timeout_ms", text)


def _definitions(node: NodeDefinition | None) -> dict[str, StepDefinition]:
    return {step.name: step for step in (*node.steps, *node.shadows)} if node else {}


def _longest(spans: Sequence[_Span]) -> _Span:
    longest = max(spans, key=lambda span: span.total_ms, default=_Span())
    return longest._replace(is_bounded=all(span.is_bounded for span in spans))


def _longest_path(followers: Sequence[Sequence[int]], spans: Sequence[_Span]) -> _Span:
    ends: dict[int, _Span] = {}
    before: dict[int, list[int]] = {i: [] for i in range(len(spans))}
    for i, each in enumerate(followers):
        for follower in each:
            before[follower].append(i)
    for i in TopologicalSorter(before).static_order():
        ends[i] = _longest([ends[other] for other in before[i]]).then(spans[i])
    return _longest([*ends.values()])
