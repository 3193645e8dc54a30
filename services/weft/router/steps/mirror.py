"""Compares the answers of a shadow with those of its node, when both are there."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from weft.base.errors import WeftError
from weft.base.tensors import WireTensor, decode, joined
from weft.language.plan import NodePlan, ShadowPlan, StepPlan
from weft.router.reporting.counters import StepCounters
from weft.router.runtime import Runtime
from weft.router.steps.run import Run

#: Tensors of more bytes are compared on another thread.
_MAX_BYTES_ON_LOOP = 1 << 18
#: Of a stream, on either side, with so many for each tensor; longer ones are not compared.
_MAX_HELD_BYTES = 4 << 20
_TENSOR_BYTES = 256


class Mirror:
    """Counts, by tensor, how often a shadow agrees with its node.

    In a rollout the agreement counts for the candidate where it gave one of the two answers, as the step that the
    splitter chose or as the shadow.
    """

    def __init__(self, step: StepPlan, node: NodePlan, graph: str, runtime: Runtime, counters: StepCounters) -> None:
        self.plan = shadow = cast("ShadowPlan", step.shadow)
        self.counters = counters
        self.slots = {name: slot for name, slot in node.outputs if name in shadow.compared}
        self.keys = {name: f"{step.path}/{name}" for name in self.slots}
        self.captures = {step.path: tuple(self.slots)}
        self.streams = node.streams
        self._rollout, self._is_candidate = None, False
        if (plan := node.rollout) is not None:
            self._rollout = runtime.rollouts.register(graph, node.path, plan)
            mine, theirs = step.action, node.steps[plan.index].action
            self._is_candidate = getattr(mine, "name", mine) == getattr(theirs, "name", theirs)

    def count(self, run: Run, agreed: Mapping[str, bool]) -> None:
        """Count which outputs of a request agree."""
        for name, does in agreed.items():
            self.counters.compared[name, does] += 1
        rollout, answered = self._rollout, run.record.steps[-1:]
        if rollout is None or not agreed or not answered or answered[0].status != "OK":
            return
        if (answered[0].name == rollout.plan.candidate) != self._is_candidate:
            rollout.candidate.num_compared += 1
            rollout.candidate.num_agreed += all(agreed.values())


class Side:
    """The tensors of one side of a comparison, by output and of each response.

    Args:
        keys: By output, of what ``add`` gets.

    Attributes:
        has_ended: There are no more.
        is_cut: There are more than are held.
    """

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.tensors: dict[str, list[WireTensor]] = {name: [] for name in keys}
        self.has_ended = self.is_cut = False
        self._keys, self._num_bytes = keys, 0

    def add(self, get: Callable[[Any], WireTensor | None]) -> None:
        """Keep the tensors of a response."""
        for name, held in self.tensors.items():
            if (tensor := get(self._keys[name])) is not None:
                self._num_bytes += _TENSOR_BYTES + len(tensor.data)
                self.is_cut |= bool(held) and self._num_bytes > _MAX_HELD_BYTES
                if not self.is_cut:
                    held.append(tensor)


class Comparison:
    """The comparison of one copy with the node of ``run``."""

    def __init__(self, mirror: Mirror, run: Run) -> None:
        self.mine, self._theirs = Side(mirror.keys), Side(mirror.slots)
        self._mirror, self._run, self._over = mirror, run, asyncio.Event()
        run.request.on_end.append(self._end_watch)
        run.record.watching += (self._theirs,)

    def _end_watch(self) -> None:
        self._run.record.watching = ()  # a viewer may keep the record for long
        self._over.set()

    async def end(self) -> None:
        """Compare, once the request is over too."""
        mine, theirs, mirror = self.mine, self._theirs, self._mirror
        await self._over.wait()
        if not mirror.streams:
            theirs.add(self._run.frame.__getitem__)
        if mine.is_cut or theirs.is_cut or theirs.has_ended != mirror.streams:
            return
        agreed = {}
        for name, own in mine.tensors.items():
            other = theirs.tensors[name]
            if (own and other) or (mirror.streams and (own or other)):
                if sum(len(one.data) for one in (*own, *other)) > _MAX_BYTES_ON_LOOP:
                    agreed[name] = await asyncio.to_thread(agrees, own, other, mirror.plan)
                else:
                    agreed[name] = agrees(own, other, mirror.plan)
        mirror.count(self._run, agreed)


def agrees(mine: Sequence[WireTensor], theirs: Sequence[WireTensor], plan: ShadowPlan) -> bool:
    """Whether the tensors of two streams agree, one by one; strings as the text that they are together."""
    if (len(mine), len(theirs)) != (1, 1) and all(one.datatype == "BYTES" for one in (*mine, *theirs)):
        mine, theirs = [joined(mine)], [joined(theirs)]
    return len(mine) == len(theirs) and all(_does(*pair, plan) for pair in zip(mine, theirs, strict=True))


def _does(mine: WireTensor, theirs: WireTensor, plan: ShadowPlan) -> bool:
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
