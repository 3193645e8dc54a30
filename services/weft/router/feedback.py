"""``weft.graph.GraphService`` of a router: feedback for bandits, signatures of models, recordings."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import TypeVar, cast

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.observing.logs import get_logger
from weft.base.security.access import allows, caller_name, check_model
from weft.router.bandits.store import BanditChoice, BanditStore, KnownArm, bandit_choices
from weft.router.observe import Observer, picture
from weft.router.repository.config import signatures_of
from weft.router.repository.serving import ServingGraph
from weft.router.repository.table import GraphTable, GraphVersion
from weft.router.repository.weights import weights_of
from weft.router.rollouts.counts import ArmCounts
from weft.router.rollouts.machine import advance, examine, share_now
from weft.router.rollouts.owner import RolloutMember, sums_of
from weft.router.rollouts.shared import Document, state_of
from weft.router.rollouts.store import Rollout
from weft.router.serving import serving_of
from weft.router.targets.catalog import TargetCatalog
from weft.v2.protocol.services import add_service, method_handlers
from weft.v2.server.call_boundary import CallBoundary, Context
from weft.wire.interface import grpc
from weft_protos import graph_service_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GraphService"].full_name

_MAX_SHOWN_CHARS = 80
#: Of ``Rollout`` by number; "": none.
_ACTIONS = {number: "" if name == "STATUS" else name for name, number in pb.RolloutRequest.Action.items()}

#: Gives the response of the one that got the request after that time of the monotonic clock; None if none did.
Siblings = Callable[[pb.GraphFeedbackRequest, int], Awaitable[pb.GraphFeedbackResponse | None]]
#: Starts, ends or describes recordings of graphs that there are.
Record = Callable[[pb.RecordingRequest], Awaitable[pb.RecordingResponse]]

_log = get_logger("weft.router")

Request = TypeVar("Request")
Response = TypeVar("Response")


def _answering(
    rpc: Callable[["GraphServicer", Request, Context], Awaitable[Response]],
) -> Callable[["GraphServicer", Request, Context], Awaitable[Response]]:
    """Wrap the RPC: errors become its status."""

    @wraps(rpc)
    async def answer(self: "GraphServicer", request: Request, context: Context) -> Response:
        try:
            return await rpc(self, request, context)
        except Exception as error:
            self.edge.fail(context, error)
            return cast(Response, None)  # not sent

    return answer


class GraphServicer:
    """Serves ``weft.graph.GraphService``.

    Args:
        siblings: Forwards feedback to the worker that got the request, or the latest with its id; None: there are none.
    """

    def __init__(
        self,
        graphs: GraphTable,
        bandits: BanditStore,
        catalog: TargetCatalog,
        observer: Observer,
        record: Record,
        rollouts: RolloutMember,
        change_weights: Callable[[pb.SetWeightsRequest], Awaitable[None]],
        siblings: Siblings | None = None,
    ) -> None:
        self._observer = observer
        self.edge = CallBoundary("weft.router")
        self._graphs = graphs
        self._bandits = bandits
        self._catalog = catalog
        self._record = record
        self._rollouts = rollouts
        self._change_weights = change_weights
        self._siblings = siblings

    def add_to(self, server: grpc.aio.Server) -> tuple[str]:
        """Add the service to a server; return its full name."""
        add_service(server, SERVICE_NAME, method_handlers(self, pb.DESCRIPTOR.services_by_name["GraphService"]))
        return (SERVICE_NAME,)

    @_answering
    async def GraphFeedback(self, request: pb.GraphFeedbackRequest, context: Context) -> pb.GraphFeedbackResponse:
        """Count a reward; ``graph_service.proto`` lists the statuses."""
        check_model(request.graph)
        self._graph(request.graph)
        if not request.HasField("reward"):
            raise InvalidArgumentError("'reward' is missing; give a number from 0 (worst) to 1 (best)")
        match request.WhichOneof("request"):
            case "request_id":
                since_ns = self._bandits.recent.time_ns(request.graph, request.request_id)
                if self._siblings is not None and (found := await self._siblings(request, since_ns)) is not None:
                    return found
                return rewarded(self._bandits, request)
            case "path":
                arms = self._bandits.reward_choices(request.graph, self._choices(request), request.reward)
            case _:
                raise InvalidArgumentError(
                    "give 'request_id' or 'path', the value of the trailing metadata x-graph-path"
                )
        return pb.GraphFeedbackResponse(arm=map(_arm_message, arms))

    @_answering
    async def TargetSignatures(
        self, request: pb.TargetSignaturesRequest, context: Context
    ) -> pb.TargetSignaturesResponse:
        """The signatures that the targets reported last."""
        return signatures_of(self._catalog)

    @_answering
    async def GraphSource(self, request: pb.GraphSourceRequest, context: Context) -> pb.GraphSourceResponse:
        """The texts that serve."""
        check_model(request.graph)
        found = self._graph(request.graph, str(request.version) if request.version else "")
        return pb.GraphSourceResponse(graph=_texts(serving_of(found)))

    @_answering
    async def Observe(self, request: pb.ObserveRequest, context: Context) -> pb.ObserveResponse:
        """What all graphs that the caller may use do now."""
        return await self._observer.observe(request)

    @_answering
    async def GraphPicture(self, request: pb.GraphSourceRequest, context: Context) -> pb.GraphPictureResponse:
        """The picture of what serves."""
        check_model(request.graph)
        found = self._graph(request.graph, str(request.version) if request.version else "")
        serving = serving_of(found)
        response = await asyncio.to_thread(picture, serving.plan)
        response.files.extend(_texts(serving))
        return response

    @_answering
    async def Recording(self, request: pb.RecordingRequest, context: Context) -> pb.RecordingResponse:
        """Start, end or describe; ``graph_service.proto`` lists the statuses."""
        if request.graph or request.action != request.STATUS:
            check_model(request.graph)
        if request.action == request.START:
            self._graph(request.graph)
        response = await self._record(request)
        return pb.RecordingResponse(recording=[one for one in response.recording if allows(one.graph)])

    @_answering
    async def Rollout(self, request: pb.RolloutRequest, context: Context) -> pb.RolloutResponse:
        """Tell how rollouts stand, or change one."""
        action = _ACTIONS.get(request.action, str(request.action))
        if not request.graph:
            if action:
                raise InvalidArgumentError("'graph' is missing; without it only STATUS is told")
            rollouts = [one for name in self._graphs.graphs if allows(name) for one in self._graphs.rollouts(name)]
        else:
            check_model(request.graph)
            self._graph(request.graph)
            found = self._graphs.rollouts(request.graph)
            rollouts = [one for one in found if request.node in ("", one.name)]
            if not rollouts:
                at = f" at node '{request.node[:_MAX_SHOWN_CHARS]}'" if request.node else ""
                raise NotFoundError(f"graph '{request.graph}' has no rollout{at}; 'rollout' of a splitter makes one")
        if action and len(rollouts) > 1:
            nodes = ", ".join(one.name for one in rollouts)
            raise InvalidArgumentError(f"graph '{request.graph}' has rollouts of nodes {nodes}; give one 'node'")
        document = await self._rollouts.look(*rollouts, action=action, who=caller_name())
        messages = await asyncio.to_thread(lambda: [_rollout_message(one, document) for one in rollouts])
        return pb.RolloutResponse(rollout=messages)

    @_answering
    async def SetWeights(self, request: pb.SetWeightsRequest, context: Context) -> pb.SetWeightsResponse:
        """Change the weights of a splitter as a change of its graph's text, which ``rollback`` undoes."""
        check_model(request.graph)
        graph = self._graph(request.graph, str(request.version or ""))
        source, request.version = serving_of(graph).source, int(graph.file.version)
        await self._change_weights(request)
        before, after = (weights_of(one, request.node) for one in (source, serving_of(graph).source))
        revision = time.time_ns() // 1_000_000
        _log.warning(
            "weights of graph '%s' version %d, node '%s', revision %d, set by '%s', reason %r: %s -> %s",
            *(request.graph, request.version, request.node, revision, caller_name(), request.reason, before, after),
        )
        return pb.SetWeightsResponse(weight=after, revision=revision)

    def _graph(self, name: str, version: str = "") -> GraphVersion:
        """Raises NotFoundError."""
        found = self._graphs.find(name, version)
        if found is None:
            raise NotFoundError(f"'{name[:_MAX_SHOWN_CHARS]}' is no graph of this router")
        return found

    def _choices(self, request: pb.GraphFeedbackRequest) -> list[BanditChoice]:
        failure: InvalidArgumentError | None = None
        for plan in self._graphs.plans(request.graph, request.version):
            try:
                choices = bandit_choices(request.path, plan.root)
            except InvalidArgumentError as error:
                failure = failure or error
                continue
            if choices:
                return choices
            failure = failure or InvalidArgumentError(
                f"path {request.path[:200]!r} passes no bandit of graph '{request.graph}' version "
                f"{plan.signature.version}; there is nothing to reward"
            )
        raise failure or NotFoundError(f"no version of graph '{request.graph}' is loaded")


def _texts(serving: ServingGraph) -> Iterator[pb.GraphText]:
    """Files of a graph, and of those in it."""
    for one in serving.sources:
        text = one.text.encode() if isinstance(one.text, str) else one.text
        yield pb.GraphText(graph=one.name, version=int(one.version or 1), file=one.file, text=text)


def rewarded(bandits: BanditStore, request: pb.GraphFeedbackRequest, after_ns: int = 0) -> pb.GraphFeedbackResponse:
    """Count a reward for a request identified by its id. Raises like ``BanditStore.reward_request``."""
    arms = bandits.reward_request(request.graph, request.request_id, request.reward, after_ns)
    return pb.GraphFeedbackResponse(arm=map(_arm_message, arms))


def _arm_message(known: KnownArm) -> pb.Arm:
    arm = known.arm
    return pb.Arm(
        node=known.node,
        step=known.step,
        num_pulls=arm.num_pulls,
        num_rewards=arm.num_rewards,
        reward_sum=arm.reward_sum,
    )


def _rollout_message(rollout: Rollout, document: Document) -> pb.RolloutStatus:
    """How it stands over all members; while it runs, ``verdict`` is what it waits for."""
    plan, state, sides = rollout.plan, state_of(document.rollouts[rollout.key]), sums_of(rollout.key, document)
    looked_at = advance(plan, state, *sides, time.time_ns())
    return pb.RolloutStatus(
        graph=rollout.graph,
        node=rollout.name,
        candidate=plan.candidate,
        phase=pb.RolloutStatus.Phase.Value(state.phase),
        percent=100 * share_now(plan, state),
        step=state.step,
        num_steps=len(plan.shares),
        revision=state.revision,
        changed_unix_ns=state.changed_unix_ns,
        verdict=(state if looked_at.revision > state.revision else looked_at).verdict,
        candidate_arm=_side_message(sides[0]),
        baseline_arm=_side_message(sides[1]),
        guard=[
            pb.GuardStatus(**{name: getattr(one, name) for name in pb.GuardStatus.DESCRIPTOR.fields_by_name})
            for one in examine(plan, state, *sides)
        ],
        owner=document.owner,
        history=state.history,
    )


def _side_message(counts: ArmCounts) -> pb.RolloutArm:
    return pb.RolloutArm(
        p50_ms=counts.quantile_ms(0.5),
        p99_ms=counts.quantile_ms(0.99),
        score_mean=counts.score_sum / max(counts.num_scores, 1),
        **{name: getattr(counts, name) for name in pb.RolloutArm.DESCRIPTOR.fields_by_name if name.startswith("num_")},
    )
