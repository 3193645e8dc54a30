"""What the graphs of a router do now, and their pictures: for ``Observe`` and ``GraphPicture``."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

from weft.base.errors import NotFoundError
from weft.base.security.access import CALLER, allows
from weft.base.statistics import ModelStatistics
from weft.language.draw.build import build_diagram
from weft.language.draw.formats import render_svg
from weft.language.plan import CallPlan, GraphPlan
from weft.router.admission.controller import AdmissionController
from weft.router.reporting.recent import RecentRequests
from weft.router.repository.serving import steps_of
from weft.router.repository.table import GraphTable, GraphVersion
from weft.router.runtime import Runtime
from weft.router.targets.catalog import TargetCatalog
from weft_protos import graph_service_pb2 as pb

#: Requests are kept for so long after the last question for them.
LEASE_S = 10.0

#: Asks the other routers behind the port.
Others = Callable[[pb.ObserveRequest], Awaitable[Iterable[pb.ObserveResponse]]]


class Observer:
    """Reads counters that count anyway; requests are kept only while it is asked for them.

    Args:
        others: None: this router is alone.
    """

    def __init__(
        self,
        graphs: GraphTable,
        runtime: Runtime,
        catalog: TargetCatalog,
        admission: AdmissionController,
        model_control: str,
        others: Others | None = None,
    ) -> None:
        self._graphs = graphs
        self._runtime = runtime
        self._catalog = catalog
        self._admission = admission
        self._model_control = model_control
        self.others = others
        self._kept_until_s = 0.0

    async def observe(self, request: pb.ObserveRequest) -> pb.ObserveResponse:
        """Answer for all routers behind the port, what the caller may see. Raises NotFoundError."""
        response = self.observe_here(request)
        if self.others is not None:
            for other in await self.others(request):
                response.MergeFrom(other)
        if CALLER.get() is not None:
            for field in (response.graph, response.step, response.arm, response.request):
                seen = [one for one in field if allows(one.graph)]
                del field[:]
                field.extend(seen)  # type: ignore[arg-type]  # each its own kind
        if request.request_key and not response.request:
            raise NotFoundError("no such request is kept any more")
        return response

    def observe_here(self, request: pb.ObserveRequest) -> pb.ObserveResponse:
        """Answer for this process."""
        wanted = set(request.graph)
        response = pb.ObserveResponse(model_control=self._model_control, unix_ns=time.time_ns())
        names = set()
        for entry in self._graphs:
            name = entry.file.name
            graph = _graph_message(entry.statistics, has_buckets=name in wanted)
            if name not in names and (limit := self._admission.limits.get(name)) is not None:
                graph.num_inflight = limit.num_inflight
            names.add(name)
            response.graph.append(graph)
            if name in wanted:
                _add_steps(entry, response)
        for seen in self._catalog.counters():
            if seen.name not in names and (seen.success.count or seen.fail.count):
                response.graph.append(_graph_message(seen, is_model=True))
        for target in self._catalog.replicated:
            for replica in target.replicas:
                response.replica.add(
                    target=target.name,
                    endpoint=replica.address,
                    state=target.state_of(replica),
                    num_inflight=replica.num_inflight,
                    num_picks=replica.num_picks,
                    num_ejections=replica.record.num_ejected,
                )
        for server in self._catalog.servers:
            state = "serving" if server.is_reachable else "unreachable"
            response.replica.add(target=server.name, endpoint=server.address, state=state)
        if request.request_key or request.HasField("requests_after_unix_ns"):
            recent = self._recent()
            if request.request_key:
                found = recent.find(request.request_key)
                response.request.extend([] if found is None else [found])
            else:
                response.request.extend(recent.after(request.requests_after_unix_ns))
        return response

    def _recent(self) -> RecentRequests:
        """The kept requests; from now on, and for the lease, requests are kept."""
        self._kept_until_s = time.monotonic() + LEASE_S
        if self._runtime.recent is None:
            self._runtime.recent = RecentRequests()
            self._expire()
        return self._runtime.recent

    def _expire(self) -> None:
        left_s = self._kept_until_s - time.monotonic()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._expire)
        else:
            self._runtime.recent = None


def _graph_message(seen: ModelStatistics, *, has_buckets: bool = False, is_model: bool = False) -> pb.ObservedGraph:
    levels = [level.counts for level in seen.request_latency.values()] if has_buckets else ()
    return pb.ObservedGraph(
        graph=seen.name,
        version=seen.version,
        num_ok=seen.success.count,
        num_failed=seen.fail.count,
        total_ns=seen.success.total_ns,
        bucket=map(sum, zip(*levels, strict=True)),
        is_model=is_model,
    )


def _add_steps(entry: GraphVersion, response: pb.ObserveResponse) -> None:
    serving = entry.serving
    if serving is None:
        return
    for one in serving.step_counters:
        response.step.add(
            graph=one.graph,
            version=one.version,
            path=one.path,
            bucket=one.latency.counts,
            failure=one.failures,
            event=one.events,
        )
    for graph, node, step, arm in serving.arms:
        known = pb.Arm(
            node=node, step=step, num_pulls=arm.num_pulls, num_rewards=arm.num_rewards, reward_sum=arm.reward_sum
        )
        response.arm.add(graph=graph, arm=known)


def picture(plan: GraphPlan) -> pb.GraphPictureResponse:
    """Draw a graph; takes milliseconds, or more of a large one."""
    diagram = build_diagram(plan)
    boxes = {item.path: item for group in diagram.boxes() for item in (group, *getattr(group, "items", ()))}
    response = pb.GraphPictureResponse(
        graph=plan.signature.name, version=plan.signature.version, svg=render_svg(diagram, has_style=False)
    )
    for node, step in steps_of(plan.root):
        path, box = step.path, boxes.get(step.path)
        shown = response.step.add(path=path, name=step.name, node=node.path, kind=node.describe().kind)
        shown.is_shadow = step.shadow is not None
        if isinstance(step.action, CallPlan):
            shown.model, shown.target = step.action.model_name, step.action.target
            shown.model_version = step.action.signature.version
        if ">" in path.rpartition("/")[2]:
            shown.fallback_of = path.rpartition(">")[0]
        if box is not None:
            shown.title, shown.tooltip = box.title, box.tooltip
            shown.line.extend(box.lines)
    return response
