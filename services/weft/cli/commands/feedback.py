"""``weft feedback``: rewards the choices that the bandits of a graph made for a request."""

import argparse
import asyncio
import json
from functools import partial

from weft.base.text.argument_types import add
from weft.cli.arguments import add_json_argument, add_router_arguments, graph_version, reward
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security
from weft_protos import graph_service_pb2 as pb

_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft feedback``."""
    option = partial(add, parser)
    parser.description = "Reward the steps that the bandits of a graph chose for a request."
    parser.epilog = "example: weft feedback ranking --request-id 7f3a --reward 0.7"
    option("graph GRAPH", "NAME/VERSION for a path of one version", graph_version)
    request = partial(add, parser.add_mutually_exclusive_group(required=True))
    request("--request-id ID", "id of the request")
    request("--path PATH", "the path that it took, as weft infer --trace shows it")
    option("--reward X", "0 (worst) to 1 (best)", reward, required=True)
    add_router_arguments(parser)
    add_json_argument(parser)


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
    client = V2Client(options.url, security=channel_security(options))
    async with client as router, router.names_similar_models(name):
        return await router.graph_feedback(request, timeout_s=_TIMEOUT_S)
