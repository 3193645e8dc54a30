"""`weft feedback` against a router's service in a thread of its own."""

import json
from typing import Any

import grpc
import pytest
from tests.unit.mesh.serving import ListingCore, serving

from weft.cli.__main__ import main
from weft.v2.server.servicer import Extension
from weft_protos import graph_service_pb2 as pb
from weft_protos import graph_service_pb2_grpc as pb_grpc


class Bandits(pb_grpc.GraphServiceServicer):
    """Keeps the feedback; answers with two arms, or that the request is not known."""

    def __init__(self) -> None:
        self.requests: list[pb.GraphFeedbackRequest] = []

    async def GraphFeedback(  # noqa: N802  # the protocol's name
        self, request: pb.GraphFeedbackRequest, context: Any
    ) -> pb.GraphFeedbackResponse:
        self.requests.append(request)
        if request.request_id == "late":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no request 'late'")
        arms = [
            pb.Arm(node="root/ab", step="A", num_pulls=8, num_rewards=3, reward_sum=2.0),
            pb.Arm(node="root/ab", step="B", num_pulls=1, num_rewards=4, reward_sum=1.0),
        ]
        return pb.GraphFeedbackResponse(arm=arms)

    def add_to(self, server: grpc.aio.Server) -> tuple[str]:
        pb_grpc.add_GraphServiceServicer_to_server(self, server)
        return ("weft.graph.GraphService",)


def test_what_is_known_of_the_rewarded_steps_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The mean is what the bandits compare; the request is named by its id, or by its path and a version."""
    bandits = Bandits()
    with serving(ListingCore({}), Extension(bandits.add_to)) as url:
        assert main(["feedback", "g", "--request-id", "r1", "--reward", "0.5", "--url", url]) == 0
        assert main(["feedback", "g/3", "--path", "root[A]", "--reward", "0", "--url", url]) == 0
        line = "root/ab[A]  pulls 8, rewards 3, mean 0.250\nroot/ab[B]  pulls 1, rewards 4, mean 0.250\n"
        assert 2 * line == capsys.readouterr().out
        assert main(["feedback", "g", "--request-id", "r1", "--reward", "0.5", "--url", url, "--json"]) == 0
        first = json.loads(capsys.readouterr().out)["arms"][0]
        assert {"node": "root/ab", "step": "A", "pulls": 8, "rewards": 3, "mean": 0.25} == first
        bandits.requests.pop()
        assert main(["feedback", "g", "--request-id", "late", "--reward", "1", "--url", url]) == 1
        assert capsys.readouterr().err == "weft: NOT_FOUND: no request 'late'\n"
    assert [
        pb.GraphFeedbackRequest(graph="g", request_id="r1", reward=0.5),
        pb.GraphFeedbackRequest(graph="g", version=3, path="root[A]", reward=0.0),
        pb.GraphFeedbackRequest(graph="g", request_id="late", reward=1.0),
    ] == bandits.requests


def test_a_server_that_is_no_router_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The model service, for one, has no bandits."""
    with serving(ListingCore({})) as url:
        assert main(["feedback", "g", "--request-id", "r1", "--reward", "1", "--url", url]) == 1
    assert (
        capsys.readouterr().err == f"weft: UNIMPLEMENTED: '{url}' is no router of Weft, or one without GraphFeedback\n"
    )
