"""``weft feedback``: rewards the choices that the bandits of a graph made for a request."""

import argparse
import asyncio
import json

from weft.base.errors import RemoteError, UnsupportedError
from weft.cli.answers.similar import names_similar_models
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security
from weft_protos import graph_service_pb2 as pb

_TIMEOUT_S = 10.0


def run(options: argparse.Namespace) -> int:
    """Print the rewarded steps and return 0; raises WeftError."""
    response = asyncio.run(_feedback(options))
    arms = [
        {
            "node": arm.node,
            "step": arm.step,
            "pulls": arm.num_pulls,
            "rewards": arm.num_rewards,
            "mean": arm.reward_sum / max(arm.num_pulls, arm.num_rewards),
        }
        for arm in response.arm
    ]
    if options.json:
        print(json.dumps({"graph": options.graph, "arms": arms}))
        return 0
    for arm in arms:
        print(f"{arm['node']}[{arm['step']}]  pulls {arm['pulls']}, rewards {arm['rewards']}, mean {arm['mean']:.3f}")
    return 0


async def _feedback(options: argparse.Namespace) -> pb.GraphFeedbackResponse:
    name, _, version = options.graph.partition("/")
    request = pb.GraphFeedbackRequest(graph=name, version=int(version or 0), reward=options.reward)
    if options.request_id is not None:
        request.request_id = options.request_id
    else:
        request.path = options.path
    async with V2Client(options.url, security=channel_security(options)) as router:
        try:
            async with names_similar_models(router, name):
                return await router.graph_feedback(request, timeout_s=_TIMEOUT_S)
        except RemoteError as error:
            if error.code == UnsupportedError.code:
                raise UnsupportedError(f"'{options.url}' is no router of Weft; it has no bandits") from error
            raise
