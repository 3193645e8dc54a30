"""Calls that one failing request may become, because retries multiply one another (G022)."""

from typing import NamedTuple

from weft.language.plan import GraphPlan, NodePlan, StepPlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition, StepDefinition

#: More calls than this are warned of.
MAX_CALLS = 4


class _Calls(NamedTuple):
    """How many calls, and how they come about: "" for one call, else a product or a sum."""

    total: int = 1
    text: str = ""


def check_amplification(file: GraphFile, plan: GraphPlan, report: GraphReport) -> None:
    """Warn of steps that may become more than ``MAX_CALLS`` calls, at the outermost that multiplies.

    Attempts and hedges multiply, also with those of the nodes and graphs inside; a fallback adds its own. Of the steps
    of a node the worst counts. Nodes of other graphs count, but are reported when those graphs are compiled.
    """
    _AmplificationChecker(file, report).check(plan.root, file.nodes[plan.root.name])


class _AmplificationChecker:
    def __init__(self, file: GraphFile, report: GraphReport) -> None:
        self._file = file
        self._report = report

    def check(self, plan: NodePlan, node: NodeDefinition) -> None:
        """Warn of the steps of a node, or else of those inside them."""
        definitions = {step.name: step for step in (*node.steps, *node.shadows)}
        for step in (*plan.steps, *plan.shadows):
            definition = definitions[step.name]
            calls = self._step_calls(step, node, definition)
            if calls.total <= MAX_CALLS:
                continue
            is_factor = any(policy.num_calls > 1 for policy in step.policies) or step.fallback is not None
            if isinstance(step.action, NodePlan) and not is_factor and not step.action.graph:
                self.check(step.action, self._file.nodes[definition.message.node])
                continue
            text = (
                f"when models fail, one request may become {calls.total} calls: {calls.text}; more than {MAX_CALLS} "
                "make an overload worse, so retry at one level, or fewer times"
            )
            self._report.warning("G022", self._file, definition.path, text)

    def _node_calls(self, plan: NodePlan, node: NodeDefinition | None) -> _Calls:
        """The worst step of a node, with the model that combines after it."""
        definitions = {step.name: step for step in (*node.steps, *node.shadows)} if node else {}
        steps = (*plan.steps, *plan.customs)
        calls = [self._step_calls(step, node, definitions.get(step.name)) for step in steps]
        return max(calls, key=lambda one: one.total, default=_Calls())

    def _step_calls(self, plan: StepPlan, node: NodeDefinition | None, step: StepDefinition | None) -> _Calls:
        inner = _Calls()
        if isinstance(plan.action, NodePlan):
            target = self._file.nodes.get(step.message.node) if step and not plan.action.graph else None
            inner = self._node_calls(plan.action, target)
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

    def _place(self, field: str, node: NodeDefinition | None, step: StepDefinition | None) -> str:
        """Where the step, or else its node, or else the graph says so."""
        if node is None or step is None:
            return ""
        paths = (f"{step.path}.policy.{field}", f"{node.path}.policy.{field}", f"policy.{field}")
        path = next((path for path in paths if path in self._file.positions), "")
        return f" ({self._file.place(path)})" if path else ""
