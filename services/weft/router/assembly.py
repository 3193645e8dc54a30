"""From a plan to nodes and steps that can run; done once, when the graph is loaded."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from weft.language.plan import CallPlan, GraphPlan, NodePlan, StepPlan
from weft.router.admission import InflightLimit
from weft.router.policies.attempt import Attempt
from weft.router.reporting.step_counters import StepCounters
from weft.router.runtime import Runtime
from weft.router.steps import (
    Action,
    CallAction,
    ErrorContext,
    GuardedStep,
    Node,
    NodeAction,
    NodeParts,
    OperatorPlan,
    PolicyParts,
    ShadowedNode,
    ShadowStep,
    Step,
    StepPolicyPlan,
    StreamAction,
    StreamNodeAction,
    StreamParts,
)
from weft.router.steps.defaults import Defaults


class Assembly:
    """Makes nodes and steps of one graph.

    Args:
        plan: The graph.
        runtime: What they share with other graphs.
    """

    def __init__(self, plan: GraphPlan, runtime: Runtime) -> None:
        name, version = plan.signature.name, plan.signature.version
        self._runtime = runtime
        self.error_context = ErrorContext(
            prefix=plan.error_prefix,
            is_batching=plan.signature.max_batch_size > 0,
            graph=name,
            version=version,
        )
        #: Where the tensors of a node, or those of its steps, differ from the graph's in having a batch dimension.
        self._other_context = replace(self.error_context, is_batching=not self.error_context.is_batching)
        #: By nested graph and node: every use of a node counts against the same ``max_inflight``.
        self._admissions: dict[tuple[str, str], InflightLimit] = {}

    def node(self, plan: NodePlan, graph: str = "") -> Node:
        """A node with all that is in it.

        Args:
            plan: The node.
            graph: The nested graph around it; "" where there is none.

        Raises:
            KeyError: It names a target that is not there.
        """
        graph = plan.graph or graph
        steps = tuple(self.step(step, plan, graph) for step in plan.steps)
        customs = tuple(self.step(step, plan, graph) for step in plan.customs)
        node = cast("OperatorPlan", plan).node(NodeParts(steps, customs, self._context(plan.is_batched), self._runtime))
        shadows = [self.step(step, plan, graph) for step in plan.shadows]
        return ShadowedNode(node, shadows) if shadows else node

    def step(self, plan: StepPlan, node: NodePlan, graph: str = "", *, stands_in: bool = False) -> Step:
        """A step with all that is in it; policies are put around what the plan has them for, and nowhere else.

        Args:
            plan: The step.
            node: Around it.
            graph: As of ``node``.
            stands_in: It is a fallback.

        Raises:
            KeyError: As ``node``.
        """
        runtime = self._runtime
        if plan.action.streams:
            plan = replace(plan, policies=tuple(policy for policy in plan.policies if policy.allows_streams))
        counters = runtime.step_counters.of(self.error_context.graph, self.error_context.version, plan.path)
        step = self._guarded(plan, node, graph, counters, stands_in=stands_in)
        return step if plan.shadow is None else ShadowStep(step, plan.shadow, runtime, counters)

    def _guarded(self, plan: StepPlan, node: NodePlan, graph: str, counters: StepCounters, *, stands_in: bool) -> Step:
        action = self._action(plan, node, graph, counters)
        context = self._context(node.batches_steps)
        clock_ns = self._runtime.clock_ns
        defaults = Defaults(plan, node)
        is_watched = plan.shadow is None or node.runs_shadows
        when = None if "when" in node.watches and is_watched else plan.when
        min_remaining_ms = 0 if "min_remaining_ms" in node.watches and not stands_in else plan.min_remaining_ms
        is_plain = not (plan.is_soft or plan.fallback or plan.max_inflight or plan.ok_slot >= 0)
        if is_plain and when is None and not min_remaining_ms:
            return Step(plan, action, context, clock_ns, counters, defaults)
        return GuardedStep(
            plan,
            action,
            context,
            clock_ns,
            counters,
            defaults,
            when=when,
            min_remaining_ms=min_remaining_ms,
            admission=self._step_admission(plan),
            fallbacks=[self.step(fallback, node, graph, stands_in=True) for fallback in _fallbacks(plan)],
        )

    def _action(self, plan: StepPlan, node: NodePlan, graph: str, counters: StepCounters) -> Action:
        """What the step does, its policies around it."""
        runtime, context = self._runtime, self._context(node.batches_steps)
        action: Action
        if isinstance(plan.action, CallPlan):
            action = self._call(plan, plan.action, node, counters)
        elif plan.action.streams:
            parts = StreamParts(counters, runtime.clock_ns, plan.is_soft, self._admission(plan.action, graph))
            action = StreamNodeAction(plan, self.node(plan.action, graph), context, parts, node)
        else:
            action = NodeAction(
                plan,
                self.node(plan.action, graph),
                context,
                runtime.clock_ns,
                node,
                admission=self._admission(plan.action, graph),
                is_tentative=bool(plan.fallback or plan.is_soft or any(one.repeats_failures for one in plan.policies)),
            )
        if plan.policies or plan.fallback:
            action = Attempt(action, plan.name, plan.path)
        around = PolicyParts(plan, context, runtime, counters)
        for policy in reversed(plan.policies):
            action = cast("StepPolicyPlan", policy).wrap(action, around)
        return action

    def _call(self, plan: StepPlan, call: CallPlan, node: NodePlan, counters: StepCounters) -> Action:
        target, context = self._runtime.targets[call.target], self._context(node.batches_steps)
        if not call.signature.is_decoupled:
            return CallAction(plan, call, target, context, node)
        parts = StreamParts(counters, self._runtime.clock_ns, plan.is_soft)
        return StreamAction(plan, call, target, context, node, parts)

    def _context(self, is_batched: bool | None) -> ErrorContext:
        """The graph, for what has a batch dimension or not; None: as the graph."""
        is_same = is_batched is None or is_batched == self.error_context.is_batching
        return self.error_context if is_same else self._other_context

    def _admission(self, node: NodePlan, graph: str) -> InflightLimit | None:
        if not node.max_inflight:
            return None
        key = (node.graph or graph, node.name)
        if key not in self._admissions:
            subject = f"node '{node.name}'"
            self._admissions[key] = self._runtime.inflight_limit(subject, node.max_inflight)
        return self._admissions[key]

    def _step_admission(self, plan: StepPlan) -> InflightLimit | None:
        if not plan.max_inflight:
            return None
        return self._runtime.inflight_limit(f"step '{plan.path}'", plan.max_inflight)


def _fallbacks(plan: StepPlan) -> Iterator[StepPlan]:
    """The fallbacks of a step in the order in which they are tried; its defaults are theirs."""
    fallback = plan.fallback
    while fallback is not None:
        yield replace(fallback, fallback=None, defaults=plan.defaults)
        fallback = fallback.fallback
