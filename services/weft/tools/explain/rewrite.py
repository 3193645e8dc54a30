"""The router's own nodes, with stand-ins for what only a mesh has: models, chance, time and unknown values.

A plan is rewritten once, field by field, whatever its nodes are: every condition asks what is known of the tensors that
it reads, every call goes to a stand-in, and policies that would repeat calls, keep or refuse them are left out.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from typing_extensions import override

from weft.base.tensors import WireTensor
from weft.language.bandit_algorithms import BanditPlan
from weft.language.plan import CallPlan, GraphPlan, NodePlan, ShadowPlan, StepPlan
from weft.router.executor import Assembly
from weft.router.runtime import Runtime, ShadowPool
from weft.router.steps import Node
from weft.tools.explain.paths import OpenChance
from weft.tools.explain.stand_ins import Environment, OpenCondition, StandIn, StandInModel, StandInNode
from weft.tools.explain.values import Known, small


class Rewriter:
    """Rewrites the nodes of a plan.

    Args:
        environment: What the stand-ins share.

    Attributes:
        targets: The stand-ins of models.
        nodes: The rewritten node in the place of a step, by the step's identity.
        places: Where the rewritten nodes inside stand, by their identity.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.targets: dict[str, StandInModel] = {}
        self.nodes: dict[int, NodePlan] = {}
        self.places: dict[int, StandIn] = {}

    def node(self, plan: NodePlan) -> NodePlan:
        """The node, and all in it, with stand-ins."""
        return cast(NodePlan, self._fields(plan, plan, plan, max_inflight=0))

    def _step(self, step: StepPlan, node: NodePlan, *, is_tried: bool = False) -> StepPlan:
        """A step of ``node``; with ``is_tried`` it makes a difference whether it fails."""
        is_tried = is_tried or step.is_soft or step.fallback is not None
        action: CallPlan | NodePlan
        if isinstance(step.action, CallPlan):
            target, signature = str(len(self.targets)), step.action.signature
            self.targets[target] = StandInModel(target, StandIn(self._environment, step, node, is_tried), step.action)
            outputs = tuple(replace(spec, dims=small(spec.dims)) for spec in signature.outputs)
            action = replace(step.action, target=target, signature=replace(signature, outputs=outputs))
        else:
            action = self.node(step.action)
            self.nodes[id(step)] = action
            self.places[id(action)] = StandIn(self._environment, step, node, is_tried)
        fallback = None if step.fallback is None else self._step(step.fallback, node, is_tried=step.is_soft or is_tried)
        shadow = None if step.shadow is None else ShadowPlan(100, 0)
        kept = {"action": action, "fallback": fallback, "shadow": shadow}
        return cast(StepPlan, self._fields(step, step, node, **kept, policies=(), max_inflight=0))

    def _fields(self, value: Any, owner: StepPlan | NodePlan, node: NodePlan, **kept: Any) -> Any:
        """A dataclass whose fields are rewritten, but for ``kept``, which are given."""
        changes = dict(kept)
        for one in fields(value):
            if one.init and one.name not in kept:
                old = getattr(value, one.name)
                new = self._part(old, one.name, owner, node)
                if new is not old:
                    changes[one.name] = new
        return replace(value, **changes) if changes else value

    def _part(self, value: Any, name: str, owner: StepPlan | NodePlan, node: NodePlan) -> Any:
        """What is in a field."""
        if hasattr(value, "evaluate_rows"):
            return OpenCondition(value, (id(owner), name), self._environment)
        if isinstance(value, StepPlan):
            return self._step(value, node)
        if isinstance(value, WireTensor):
            return Known(*value)
        if isinstance(value, BanditPlan):
            return None  # any step may be drawn
        if isinstance(value, tuple):
            parts = [self._part(item, name, owner, node) for item in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return self._fields(value, owner, node) if is_dataclass(value) and not isinstance(value, type) else value


class OneNode(Assembly):
    """Makes a node as the router does, but for the nodes inside it.

    Args:
        plan: The graph, its root rewritten.
        rewriter: Has rewritten it.
        environment: What the stand-ins share.
    """

    def __init__(self, plan: GraphPlan, rewriter: Rewriter, environment: Environment) -> None:
        self.plan = plan
        self._rewriter = rewriter
        shadows = _LaterShadows(environment)
        chance = OpenChance(lambda: environment.path)
        super().__init__(plan, Runtime(rewriter.targets, lambda: environment.path.clock_ns, chance, shadows=shadows))
        self._opened: NodePlan | None = None

    def opened(self, plan: NodePlan) -> Node:
        """The node itself, ready to run."""
        self._opened = plan
        return self.node(plan)

    @override
    def node(self, plan: NodePlan, graph: str = "") -> Node:
        return super().node(plan, graph) if plan is self._opened else StandInNode(plan, self._rewriter.places[id(plan)])


class _LaterShadows(ShadowPool):
    def __init__(self, environment: Environment) -> None:
        super().__init__()
        self._environment = environment

    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """``work`` is done when the node has run."""
        self._environment.path.copies.append(work)
