"""What the graphs of a router do now, and their pictures: for ``Observe`` and ``GraphPicture``."""

import asyncio
import heapq
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator

from weft.base.errors import NotFoundError, WeftError
from weft.base.observing import telemetry
from weft.base.security.access import CALLER, allows
from weft.language.draw.build import Item, build_diagram
from weft.language.draw.formats import render_svg
from weft.language.plan import CallPlan, GraphPlan
from weft.router.admission.controller import AdmissionController
from weft.router.reporting.path import NodeRecord, trace_text
from weft.router.repository.serving import ServingGraph, steps_of
from weft.router.repository.table import GraphTable
from weft.router.runtime import Runtime
from weft.router.steps.run import Run
from weft.router.targets.catalog import TargetCatalog
from weft_protos import graph_service_pb2 as pb

#: Kept of all requests, and besides of the slowest and of those that failed.
MAX_RECENT, MAX_SLOWEST, MAX_FAILED = 200, 50, 50
#: Requests are kept for so long after the last question for them.
LEASE_S = 10.0
_MAX_ERROR_CHARS = 2000
#: Lines of figure spaces in the box of a step keep the place for its numbers, which a page writes there.
_ROOM = ["\u2007" * 12] * 3

_Kept = tuple[float, int, pb.ObservedRequest, NodeRecord, int]
#: Asks the other routers behind the port.
Others = Callable[[pb.ObserveRequest], Awaitable[Iterable[pb.ObserveResponse]]]


class RecentRequests:
    """A bounded number of requests that have ended, with what their steps did, without their tensors."""

    def __init__(self) -> None:
        self._num = 0
        self._recent: deque[_Kept] = deque(maxlen=MAX_RECENT)
        self._failed: deque[_Kept] = deque(maxlen=MAX_FAILED)
        self._slowest: list[_Kept] = []
        # A number alone would be another request's after a restart, or at another worker.
        self._process = f"{os.getpid():x}{time.time_ns() >> 20 & 0xFFFFFF:x}"

    def add(self, request: pb.ObservedRequest, record: NodeRecord, start_ns: int) -> None:
        """Keep a request, which gets a key."""
        self._num += 1
        request.key = f"{self._process}-{self._num}"
        kept = (request.ms, self._num, request, record, start_ns)
        self._recent.append(kept)
        if request.status != "OK":
            self._failed.append(kept)
        (heapq.heappush if len(self._slowest) < MAX_SLOWEST else heapq.heappushpop)(self._slowest, kept)

    def after(self, unix_ms: float) -> Iterator[pb.ObservedRequest]:
        """Those that ended later, the earliest first."""
        found = {one[1]: one[2] for one in (*self._slowest, *self._failed, *self._recent) if one[2].unix_ms > unix_ms}
        return (found[number] for number in sorted(found))

    def find(self, key: str) -> Iterator[pb.ObservedRequest]:
        """The one with this key, with its steps."""
        for _, _, request, record, start_ns in (*self._recent, *self._failed, *self._slowest):
            if request.key == key:
                found = pb.ObservedRequest(steps=trace_text(record, start_ns))
                found.MergeFrom(request)
                yield found
                return


class Observer:
    """Reads counters that count anyway; keeps requests only while it is asked for them.

    Attributes:
        others: None: this router is alone.
    """

    def __init__(
        self,
        graphs: GraphTable,
        runtime: Runtime,
        catalog: TargetCatalog,
        admission: AdmissionController,
        model_control: str,
    ) -> None:
        self.others: Others | None = None
        self._graphs, self._runtime, self._catalog, self._admission = graphs, runtime, catalog, admission
        self._model_control = model_control
        self._recent = RecentRequests()
        self._kept_until_s = 0.0

    async def observe(self, request: pb.ObserveRequest) -> pb.ObserveResponse:
        """Answer for all routers behind the port, what the caller may see. Raises NotFoundError."""
        response = self.observe_here(request)
        if self.others is not None:
            unix_ms = response.unix_ms
            for other in await self.others(request):
                response.MergeFrom(other)
            response.unix_ms = unix_ms  # the earliest
        if CALLER.get() is not None:
            for field in (response.graph, response.step, response.arm, response.request):
                seen = [one for one in field if allows(one.graph)]
                del field[:]
                field.extend(seen)  # type: ignore[arg-type]  # each of its own kind
        if request.request_key and not response.request:
            raise NotFoundError("no such request is kept any more")
        return response

    def observe_here(self, request: pb.ObserveRequest) -> pb.ObserveResponse:
        """Answer for this process."""
        response = pb.ObserveResponse(model_control=self._model_control, unix_ms=time.time() * 1e3)
        wanted, graphs = set(request.graph), {entry.file.name for entry in self._graphs}
        counters = [(entry.statistics, entry.serving, False) for entry in self._graphs]
        counters += [(seen, None, True) for seen in self._catalog.counters() if seen.name not in graphs]
        for seen, serving, is_model in counters:
            limit = self._admission.limits.get(seen.name)
            levels = [level.counts for level in seen.request_latency.values()] if seen.name in wanted else []
            response.graph.add(
                graph=seen.name,
                version=seen.version,
                num_ok=seen.success.count,
                num_failed=seen.fail.count,
                total_ns=seen.success.total_ns,
                num_inflight=0 if limit is None else limit.num_inflight,
                bucket=map(sum, zip(*levels, strict=True)),
                is_model=is_model,
            )
            if serving is not None and seen.name in wanted:
                self._add_steps(serving, response)
        if request.request_key or request.HasField("requests_after_unix_ms"):
            self._kept_until_s = time.monotonic() + LEASE_S
            if self._runtime.on_end is None:
                self._runtime.on_end, self._recent = self._keep, RecentRequests()
                self._expire()
            recent, key = self._recent, request.request_key
            response.request.extend(recent.find(key) if key else recent.after(request.requests_after_unix_ms))
        return response

    def _add_steps(self, serving: ServingGraph, response: pb.ObserveResponse) -> None:
        signature = serving.plan.signature
        for node, step in steps_of(serving.plan.root):
            one = self._runtime.step_counters.of(signature.name, signature.version, step.path)
            response.step.add(
                graph=one.graph,
                version=one.version,
                path=one.path,
                node=node.path,
                kind=node.kind,
                is_aside=step.shadow is not None or bool(_fallback_of(step.path)),
                bucket=one.latency.counts,
                failure=one.failures,
                event=one.events,
            )
        for graph, path, name, arm in serving.arms:
            counts = {"num_pulls": arm.num_pulls, "num_rewards": arm.num_rewards, "reward_sum": arm.reward_sum}
            response.arm.add(graph=graph, arm=pb.Arm(node=path, step=name, **counts))

    def _keep(self, plan: GraphPlan, run: Run, path: str, start_ns: int, error: BaseException | None) -> None:
        """Keep a request that has just ended."""
        context, code = run.request.root, "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
        if isinstance(error, WeftError):
            code = error.code
        ended = pb.ObservedRequest(
            request_id=run.request.scope.request_id,
            graph=plan.signature.name,
            version=plan.signature.version,
            path=path,
            status="OK" if error is None else code,
            error="" if error is None else str(error)[:_MAX_ERROR_CHARS],
            unix_ms=time.time() * 1e3,
            ms=(time.monotonic_ns() - context.arrival_ns) / 1e6,
            trace_id=telemetry.trace_id_of(context.trace_context),
        )
        self._recent.add(ended, run.record, start_ns)

    def _expire(self) -> None:
        left_s = self._kept_until_s - time.monotonic()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._expire)
        else:
            self._runtime.on_end, self._recent = None, RecentRequests()


def _fallback_of(path: str) -> str:
    """Path of the step that the step of this path stands in for; "": it is no fallback."""
    return path.rpartition(">")[0] if ">" in path.rpartition("/")[2] else ""


def picture(plan: GraphPlan) -> pb.GraphPictureResponse:
    """Draw a graph; takes milliseconds, or more of a large one."""
    diagram = build_diagram(plan)
    boxes = {box.path: box for box in diagram.boxes()}
    lines = {path: list(box.lines) for path, box in boxes.items()}
    for box in boxes.values():
        if isinstance(box, Item) and box.path:
            box.lines += _ROOM
    signature = plan.signature
    response = pb.GraphPictureResponse(
        name=signature.name, version=signature.version, svg=render_svg(diagram, has_style=False)
    )
    for node, step in steps_of(plan.root):
        box = boxes.get(step.path, diagram)
        shown = response.steps.add(path=step.path, name=step.name, node=node.path, kind=node.kind)
        shown.is_shadow, shown.fallback_of = step.shadow is not None, _fallback_of(step.path)
        shown.title, shown.tooltip = box.title, box.tooltip
        shown.lines.extend(lines[box.path])
        if isinstance(step.action, CallPlan):
            shown.model, shown.target = step.action.model_name, step.action.target
            shown.model_version = step.action.signature.version
    return response
