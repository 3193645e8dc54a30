"""Compares the answers of a shadow with those of its node, when both are there."""

import asyncio
from typing import cast

import numpy as np

from weft.base.errors import WeftError
from weft.base.tensors import WireTensor, decode
from weft.language.plan import NodePlan, ShadowPlan, StepPlan
from weft.router.reporting.counters import StepCounters
from weft.router.runtime import Runtime
from weft.router.steps.run import Run

#: Tensors of more bytes are compared on another thread.
_MAX_BYTES_ON_LOOP = 1 << 18


class Mirror:
    """Counts, by tensor, how often a shadow agrees with its node.

    In a rollout the agreement counts for the candidate where it gave one of the two answers, as the step that the
    splitter chose or as the shadow.
    """

    def __init__(self, step: StepPlan, node: NodePlan, graph: str, runtime: Runtime, counters: StepCounters) -> None:
        self._shadow = shadow = cast("ShadowPlan", step.shadow)
        self._path = step.path
        self._counters = counters
        self._slots = [(name, slot) for name, slot in node.outputs if name in shadow.compared]
        self.captures = {step.path: tuple(name for name, _ in self._slots)}
        self._rollout, self._is_candidate = None, False
        if (plan := node.rollout) is not None:
            self._rollout = runtime.rollouts.register(graph, node.path, plan)
            mine, theirs = step.action, node.steps[plan.index].action
            self._is_candidate = getattr(mine, "name", mine) == getattr(theirs, "name", theirs)

    async def compare(self, copy: Run, run: Run, over: asyncio.Event) -> None:
        """Compare what the copy captured with the node's outputs, in the frame of ``run`` when the request is over."""
        await over.wait()
        captured = copy.request.captured
        pairs = [
            (name, mine, theirs)
            for name, slot in self._slots
            if (theirs := run.frame[slot]) is not None and (mine := captured.get(f"{self._path}/{name}")) is not None
        ]
        all_agree = bool(pairs)
        for name, mine, theirs in pairs:
            if max(len(mine.data), len(theirs.data)) > _MAX_BYTES_ON_LOOP:
                does = await asyncio.to_thread(agrees, mine, theirs, self._shadow)
            else:
                does = agrees(mine, theirs, self._shadow)
            self._counters.compared[name, does] += 1
            all_agree = all_agree and does
        rollout, answered = self._rollout, run.record.steps[-1:]
        if rollout is None or not pairs or not answered or answered[0].status != "OK":
            return
        if (answered[0].name == rollout.plan.candidate) != self._is_candidate:
            rollout.candidate.num_compared += 1
            rollout.candidate.num_agreed += all_agree


def agrees(mine: WireTensor, theirs: WireTensor, plan: ShadowPlan) -> bool:
    """Whether a shadow's tensor agrees with the node's."""
    if mine == theirs:
        return True
    try:
        a, b = decode(mine), decode(theirs)
    except WeftError:
        return False
    if np.dtype(object) in {a.dtype, b.dtype}:
        return bool(np.array_equal(a, b))
    if plan.top_1 and a.ndim and b.ndim and a.shape[-1] and b.shape[-1]:
        return bool(np.array_equal(a.argmax(axis=-1), b.argmax(axis=-1)))
    is_close = a.shape == b.shape and np.allclose(a, b, rtol=plan.rtol, atol=plan.atol, equal_nan=True)
    return bool(is_close)
