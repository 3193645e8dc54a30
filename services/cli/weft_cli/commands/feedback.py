"""``weft feedback``: rewards the choices that the bandits of a graph made for a request."""

import argparse
import asyncio
import sys

from weft_common.client.v2_client import V2Client
from weft_common.errors import RemoteError, UnsupportedError, WeftError
from weft_common.security.channel import channel_security
from weft_protos import graph_service_pb2 as pb

_TIMEOUT_S = 10.0


def run(options: argparse.Namespace) -> int:
    """Print the rewarded steps and return 0, or print the error's status and message and return 1."""
    try:
        response = asyncio.run(_feedback(options))
    except WeftError as error:
        print(f"weft: {error.code}: {error.message}", file=sys.stderr)
        return 1
    for arm in response.arm:
        mean = arm.reward_sum / max(arm.num_pulls, arm.num_rewards)
        print(f"{arm.node}[{arm.step}]  pulls {arm.num_pulls}, rewards {arm.num_rewards}, mean {mean:.3f}")
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
            return await router.graph_feedback(request, timeout_s=_TIMEOUT_S)
        except RemoteError as error:
            if error.code == UnsupportedError.code:
                raise UnsupportedError(f"'{options.url}' is no router of Weft; it has no bandits") from error
            raise
