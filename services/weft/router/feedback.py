"""``weft.graph.GraphService`` of a router: feedback for bandits, signatures of models."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import TypeVar, cast

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.security.access import check_model
from weft.router.bandits.store import BanditChoice, BanditStore, KnownArm, bandit_choices
from weft.router.observe import Observer, picture
from weft.router.repository.config import signatures_of
from weft.router.repository.serving import ServingGraph
from weft.router.repository.table import GraphTable, GraphVersion
from weft.router.serving import serving_of
from weft.router.targets.catalog import TargetCatalog
from weft.v2.protocol.services import add_service, method_handlers
from weft.v2.server.call_boundary import CallBoundary, Context
from weft.wire.interface import grpc
from weft_protos import graph_service_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GraphService"].full_name

_MAX_SHOWN_CHARS = 80

#: Gives the response of the one that knows the request; None if none does. Raises AlreadyExistsError.
Siblings = Callable[[pb.GraphFeedbackRequest], Awaitable[pb.GraphFeedbackResponse | None]]

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
        observer: Answers ``Observe``.
        siblings: Forwards feedback for a request that this router does not know to the other workers; None: there are
            none.
    """

    def __init__(
        self,
        graphs: GraphTable,
        bandits: BanditStore,
        catalog: TargetCatalog,
        observer: Observer,
        siblings: Siblings | None = None,
    ) -> None:
        self._observer = observer
        self.edge = CallBoundary("weft.router")
        self._graphs = graphs
        self._bandits = bandits
        self._catalog = catalog
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
                try:
                    return rewarded(self._bandits, request)
                except NotFoundError:
                    if self._siblings is None:
                        raise
                    response = await self._siblings(request)
                    if response is None:
                        raise
                    return response
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


def rewarded(bandits: BanditStore, request: pb.GraphFeedbackRequest) -> pb.GraphFeedbackResponse:
    """Count a reward for a request identified by its id. Raises like ``BanditStore.reward_request``."""
    arms = bandits.reward_request(request.graph, request.request_id, request.reward)
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
