"""What the graphs of a router do now, and their pictures: for ``Observe`` and ``GraphPicture``."""

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from itertools import islice
from typing import Any

from weft.base.errors import NotFoundError, WeftError
from weft.base.observing import telemetry
from weft.base.security.access import CALLER, allows
from weft.language.draw.build import Item, build_diagram
from weft.language.draw.formats import render_svg
from weft.language.plan import CallPlan, GraphPlan, steps_of
from weft.router.admission.controller import AdmissionController
from weft.router.reporting.path import NodeRecord, steps_in, trace_text
from weft.router.repository.serving import ServingGraph
from weft.router.repository.table import GraphTable
from weft.router.runtime import Runtime
from weft.router.steps.run import Run
from weft.router.targets.catalog import TargetCatalog
from weft_protos import graph_service_pb2 as pb

#: Kept of all requests, and besides of the slowest and of those that failed; told of those after a time.
MAX_RECENT, MAX_SLOWEST, MAX_FAILED, MAX_TOLD = 200, 50, 50, 50
MAX_KEPT = 2 * (MAX_RECENT + MAX_SLOWEST + MAX_FAILED)
#: Of a request with more steps than this they are not kept.
MAX_STEPS = 1000
#: Requests are kept for so long after the last question for them.
LEASE_S = 10.0
_MAX_ERROR_CHARS = 2000
#: Lines of figure spaces in the box of a step keep the place for its numbers, which a page writes there.
_ROOM = ["\u2007" * 12] * 3

#: Fields of a request's message, which is made of the few that are told; what its steps did, and when it began.
_Kept = tuple[dict[str, Any], NodeRecord, int]
#: Asks the other routers behind the port.
Others = Callable[[pb.ObserveRequest], Awaitable[Iterable[pb.ObserveResponse]]]


class Observer:
    """Reads counters that count anyway; keeps requests, without their tensors, only while it is asked for them.

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
        self._kept: list[_Kept] = []
        self._kept_until_s = 0.0
        # Keys are not those of other requests after a restart, or at another worker.
        self._keys = map(f"{os.getpid():x}{time.time_ns() >> 20 & 0xFFFFFF:x}-{{}}".format, itertools.count())

    async def observe(self, request: pb.ObserveRequest) -> pb.ObserveResponse:
        """Answer for all routers behind the port, what the caller may see. Raises NotFoundError."""
        response = self.observe_here(request)
        if self.others is not None:
            unix_ms = response.unix_ms
            for other in await self.others(request):
                response.MergeFrom(other)
            response.unix_ms = unix_ms  # the earliest
        if CALLER.get() is not None:
            for field in (response.count, response.arm, response.request):
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
        counts = []
        for seen, serving, is_model in counters:
            limit = self._admission.limits.get(seen.name)
            numbers = seen.success.count, seen.success.total_ns, 0 if limit is None else limit.num_inflight
            counts.append(_told(seen.name, seen.version, is_model, *numbers, *seen.failures_by_reason.items()))
            if seen.name in wanted:
                buckets = map(sum, zip(*[level.counts for level in seen.request_latency.values()], strict=True))
                response.count.add(graph=seen.name, version=seen.version, is_model=is_model, bucket=buckets)
                if serving is not None:
                    self._add_steps(serving, response)
        response.MergeFromString(b"".join(counts))
        if request.request_key or request.HasField("requests_after_unix_ms"):
            self._kept_until_s = time.monotonic() + LEASE_S
            if self._runtime.on_end is None:
                self._runtime.on_end = self._keep
                self._expire()
            after_ms = request.requests_after_unix_ms
            for ended, record, start_ns in self._kept[-MAX_TOLD if after_ms else 0 :]:
                if ended["key"] == request.request_key:
                    response.request.add(**ended, steps=trace_text(record, start_ns))
                elif not request.request_key and ended["unix_ms"] > after_ms:
                    response.request.add(**ended)
        return response

    def _add_steps(self, serving: ServingGraph, response: pb.ObserveResponse) -> None:
        signature = serving.plan.signature
        for node, step in steps_of(serving.plan.root):
            one = self._runtime.step_counters.of(signature.name, signature.version, step.path)
            response.count.add(
                graph=one.graph,
                version=one.version,
                path=one.path,
                node=node.path,
                kind=node.kind,
                is_aside=step.shadow is not None or bool(_fallback_of(step.path)),
                num_ok=sum(one.latency.counts),
                failure=one.failures,
                event=one.events,
                bucket=one.latency.counts,
            )
        for graph, path, name, arm in serving.arms:
            counts = pb.Arm(num_pulls=arm.num_pulls, num_rewards=arm.num_rewards, reward_sum=arm.reward_sum)
            counts.node, counts.step = path, name
            response.arm.add(graph=graph, arm=counts)

    def _keep(self, plan: GraphPlan, run: Run, path: str, start_ns: int, error: BaseException | None) -> None:
        """Keep a request that has just ended; at times drop those that are neither late, slow nor failed."""
        context, code = run.request.root, "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
        if isinstance(error, WeftError):
            code = error.code
        ended = {
            "key": next(self._keys),
            "request_id": run.request.scope.request_id,
            "graph": plan.signature.name,
            "version": plan.signature.version,
            "path": path,
            "status": "OK" if error is None else code,
            "error": "" if error is None else str(error)[:_MAX_ERROR_CHARS],
            "unix_ms": time.time() * 1e3,
            "ms": (time.monotonic_ns() - context.arrival_ns) / 1e6,
            "trace_id": telemetry.trace_id_of(context.trace_context),
        }
        record = run.record
        if any(islice(steps_in(record.steps), MAX_STEPS, None)):  # as of a map over many rows
            record = NodeRecord(record.name)
        self._kept.append((ended, record, start_ns))
        if len(self._kept) > MAX_KEPT:
            failed = [one for one in self._kept if one[0]["status"] != "OK"][-MAX_FAILED:]
            slowest = sorted(self._kept, key=lambda one: one[0]["ms"])[-MAX_SLOWEST:]
            chosen = {one[0]["key"] for one in (*self._kept[-MAX_RECENT:], *failed, *slowest)}
            self._kept = [one for one in self._kept if one[0]["key"] in chosen]

    def _expire(self) -> None:
        left_s = self._kept_until_s - time.monotonic()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._expire)
        else:
            self._runtime.on_end, self._kept = None, []


@lru_cache(maxsize=10_000)
def _told(
    graph: str, version: str, is_model: bool, num_ok: int, total_ns: int, num_inflight: int, *failures: tuple[str, int]
) -> bytes:
    """An ``ObserveResponse`` of these counts; of 1,000 graphs few have changed since they were last told."""
    one = pb.Observed(graph=graph, version=version, is_model=is_model, num_ok=num_ok, total_ns=total_ns)
    one.num_inflight = num_inflight
    one.failure.update(failures)
    return pb.ObserveResponse(count=[one]).SerializeToString()


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
