"""Shadow traffic: copies of requests that run in the background and whose answers are dropped."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from typing_extensions import override

from weft.base.errors import WeftError
from weft.base.observing.logs import get_logger
from weft.language.plan import Frame, ShadowPlan
from weft.language.pruning import slots_read
from weft.router.reporting.headers import SHADOW_HEADER
from weft.router.reporting.path import NodeRecord
from weft.router.reporting.step_counters import StepCounters
from weft.router.runtime import Runtime
from weft.router.steps.base import Node
from weft.router.steps.responses import close_streams, responses_of
from weft.router.steps.run import Run
from weft.router.steps.step import Step

#: Timeout of a copy whose step has none.
DEFAULT_TIMEOUT_MS = 30_000

#: (name of the metric after ``weft_graph_step_``, help) of what is counted here.
SHADOW_COUNTERS = (
    ("shadows_sent", "Copies of requests that were sent"),
    ("shadows_failed", "Copies of requests that failed"),
    ("shadows_dropped", "Copies that were not sent: the step or the router was busy"),
)

_log = get_logger("weft.router.shadows")


class ShadowStep(Step):
    """Sends a share of the requests to another step and returns at once; it never answers and never fails.

    Args:
        step: Runs with the copies.
        shadow: How many are sent.
        runtime: Clock, random numbers, and the owner of background tasks.
        counters: Of the shadow.
    """

    def __init__(self, step: Step, shadow: ShadowPlan, runtime: Runtime, counters: StepCounters) -> None:
        super().__init__(step.plan, step.action, step.error_context, runtime.clock_ns, counters, step.defaults)
        self._step = step
        self._share = shadow.percent / 100
        self._max_inflight = runtime.share(shadow.max_inflight)
        self._runtime = runtime
        self._slots = slots_read(step.plan)
        self._lifetime_ns = (step.plan.timeout_ms or DEFAULT_TIMEOUT_MS) * 1_000_000
        self._num_inflight = 0

    async def run(self, run: Run) -> bool:
        """Return False at once; the path does not show the shadow, its counters say whether a copy was sent."""
        runtime = self._runtime
        if runtime.generator.random() >= self._share:
            return False
        is_full = self._max_inflight and self._num_inflight >= self._max_inflight
        if is_full or runtime.is_busy() or not runtime.shadows.has_room:
            self._counters.events["shadows_dropped"] += 1
            return False
        request, frame = run.request, run.frame
        copied: Frame = [None] * len(frame)
        for slot in self._slots:
            copied[slot] = frame[slot]
        limit_ns = runtime.clock_ns() + self._lifetime_ns
        scope = dataclasses.replace(request.scope, deadline_ns=limit_ns)
        headers: Mapping[str, str] = {**request.headers, SHADOW_HEADER: "1"}
        copy = dataclasses.replace(request.fork(), scope=scope, headers=headers, pulls=None)
        self._num_inflight += 1
        self._counters.events["shadows_sent"] += 1
        own = Run(copied, copy, limit_ns, run.context, NodeRecord(self._name))
        runtime.shadows.start(self._send(own), self._ended)
        return False

    async def _send(self, run: Run) -> None:
        try:
            await self._step.run(run)
            async with contextlib.aclosing(responses_of(run)) as responses:
                async for _ in responses:
                    pass
        except WeftError as error:
            self._counters.events["shadows_failed"] += 1
            _log.debug("shadow failed: %s: %s", error.code, error.message)
        except Exception:
            self._counters.events["shadows_failed"] += 1
            _log.exception("shadow '%s' failed", self._path)
        finally:
            await close_streams((run,))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._num_inflight -= 1


class ShadowedNode(Node):
    """A node with shadow steps: they read its inputs and start when it does.

    Args:
        node: Answers.
        shadows: Receive copies of its inputs.
    """

    def __init__(self, node: Node, shadows: Sequence[Step]) -> None:
        super().__init__(node.plan)
        self._node = node
        self._shadows = tuple(shadows)

    @override
    async def run(self, run: Run) -> None:
        for shadow in self._shadows:
            await shadow.run(run)
        await self._node.run(run)
