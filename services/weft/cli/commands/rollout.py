"""``weft rollout``: shows and steers the rollouts of graphs, and sets the weights of splitters without one."""

import argparse
import asyncio
import json
import math
from functools import partial
from typing import Any

from google.protobuf.json_format import MessageToDict

from weft.base.errors import InvalidArgumentError
from weft.base.text.argument_types import add
from weft.cli.arguments import add_json_argument, add_router_arguments, pair
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security
from weft_protos import graph_service_pb2 as pb

_ACTIONS = ("status", "pause", "resume", "promote", "abort", "weights")
_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft rollout``."""
    option = partial(add, parser)
    parser.description = "Show how rollouts stand, steer one, or set weights until a rollback or the next load."
    parser.epilog = "example: weft rollout status triage, or weft rollout weights triage root new=5 old=95"
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help=", ".join(_ACTIONS))
    option("graph GRAPH", "may be left out with status", nargs="?", default="")
    option("node NODE", "name of the splitter, if the graph has several rollouts", nargs="?", default="")
    option("weight STEP=WEIGHT", "weights: of steps; the others keep theirs", pair, nargs="*")
    option("--reason TEXT", "weights: kept in the router's log", default="")
    add_router_arguments(parser)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print how it stands then and return 0; raises WeftError."""
    response = asyncio.run(_asked(options))
    if options.json:
        told = MessageToDict(response, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)
        print(json.dumps(told))
    elif isinstance(response, pb.SetWeightsResponse):
        weights = " ".join(f"{name}={weight:g}" for name, weight in response.weight.items())
        print(f"{options.graph}/{options.node}: {weights} (revision {response.revision})")
    else:
        print("\n\n".join(map(_text, response.rollout)) or "no rollouts")
    return 0


async def _asked(options: argparse.Namespace) -> Any:
    request: pb.SetWeightsRequest | pb.RolloutRequest
    if options.action == "weights":
        try:
            weights = {name: float(weight) for name, weight in options.weight}
            name, _, version = options.graph.partition("/")
            request = pb.SetWeightsRequest(graph=name, version=int(version or 0), node=options.node, weight=weights)
        except ValueError as error:
            raise InvalidArgumentError(f"a weight and a version are numbers: {error}") from None
        request.reason, method = options.reason, "SetWeights"
    else:
        action = pb.RolloutRequest.Action.Value(options.action.upper())
        request, method = pb.RolloutRequest(action=action, graph=options.graph, node=options.node), "Rollout"
    async with V2Client(options.url, security=channel_security(options)) as router:
        return await router.graph_service(method, request, timeout_s=_TIMEOUT_S)


def _text(one: pb.RolloutStatus) -> str:
    share = "the share that its bandit gives" if math.isnan(one.percent) else f"{one.percent:g} %"
    steps = f", step {one.step + 1} of {one.num_steps}" if one.num_steps else ""
    head = f"{one.graph}/{one.node}: {type(one).Phase.Name(one.phase)}, '{one.candidate}' has {share}{steps}"
    lines = [f"{head} (revision {one.revision}, owner {one.owner})", f"  {one.verdict}"]
    for name, arm in (("candidate", one.candidate_arm), ("baseline", one.baseline_arm)):
        counts = f"{arm.num_requests:>9} requests {arm.num_errors:>7} errors"
        lines.append(f"  {name:<10}{counts}   p50 {arm.p50_ms:.1f} ms   p99 {arm.p99_ms:.1f} ms")
    for guard in one.guard:
        bounds = "" if math.isnan(guard.lower) else f", between {guard.lower:.4g} and {guard.upper:.4g}"
        broken = " BROKEN" * guard.is_broken
        lines.append(f"  {guard.limit} {guard.allowed:g}: {guard.measured:.4g} measured{bounds}{broken}")
    return "\n".join(lines)
