"""``weft rollout``: shows and steers the rollouts of graphs, and sets the weights of splitters without one."""

import argparse
import asyncio
import json
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from google.protobuf.json_format import MessageToDict

from weft.base.errors import InvalidArgumentError
from weft.base.text.argument_types import add, positive
from weft.cli.arguments import add_json_argument, add_router_arguments, pair
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security
from weft_protos import graph_service_pb2 as pb

_ACTIONS = ("status", "pause", "resume", "promote", "abort", "weights")
_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft rollout``."""
    option = partial(add, parser)
    parser.description = (
        "Show how rollouts stand, hold or move one, or set the weights of a splitter without one until a rollback or "
        "the next load."
    )
    parser.epilog = "examples: weft rollout status triage; weft rollout weights triage root new=5 old=95"
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help=", ".join(_ACTIONS))
    option("graph GRAPH", "may be left out with status", nargs="?", default="")
    option("node NODE", "name of the splitter, if the graph has several rollouts", nargs="?", default="")
    option("weight STEP=WEIGHT", "weights: of steps; the others keep theirs", pair, nargs="*")
    option("--reason TEXT", "weights: kept in the router's log", default="")
    option("--watch SECONDS", "status: print it again and again", positive)
    add_router_arguments(parser)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print how it stands then and return 0; raises WeftError."""
    if options.action != "status" and not options.graph:
        raise InvalidArgumentError(f"give the graph: weft rollout {options.action} GRAPH")
    if options.action == "weights":
        weights, revision = asyncio.run(_set_weights(options))
        text = " ".join(f"{name}={weight:g}" for name, weight in weights.items())
        told = {"graph": options.graph, "node": options.node, "weights": weights, "revision": revision}
        print(json.dumps(told) if options.json else f"{options.graph}/{options.node}: {text} (revision {revision})")
        return 0
    while True:
        rollouts = asyncio.run(_rollouts(options))
        if options.json:
            print(json.dumps({"rollouts": [_facts(one) for one in rollouts]}), flush=True)
        else:
            print("\n\n".join(map(_text, rollouts)) or "no rollouts", flush=True)
        if options.watch is None or options.action != "status":
            return 0
        time.sleep(options.watch)


async def _rollouts(options: argparse.Namespace) -> Sequence[pb.RolloutStatus]:
    action = pb.RolloutRequest.Action.Value(options.action.upper())
    request = pb.RolloutRequest(action=action, graph=options.graph, node=options.node)
    return (await _ask(options, "Rollout", request)).rollout


async def _set_weights(options: argparse.Namespace) -> tuple[dict[str, float], int]:
    try:
        weights = {name: float(weight) for name, weight in options.weight}
    except ValueError as error:
        raise InvalidArgumentError(f"a weight is a number: {error}") from None
    name, _, version = options.graph.partition("/")
    request = pb.SetWeightsRequest(
        graph=name, version=int(version or 0), node=options.node, weight=weights, reason=options.reason
    )
    response = await _ask(options, "SetWeights", request)
    return dict(response.weight), response.revision


async def _ask(options: argparse.Namespace, method: str, request: Any) -> Any:
    async with V2Client(options.url, security=channel_security(options)) as router:
        return await router.graph_service(method, request, timeout_s=_TIMEOUT_S)


def _facts(one: pb.RolloutStatus) -> dict[str, Any]:
    return MessageToDict(one, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _text(one: pb.RolloutStatus) -> str:
    share = "a share that its bandit sets" if math.isnan(one.percent) else f"{one.percent:g} %"
    steps = f", step {one.step + 1} of {one.num_steps}" if one.num_steps else ""
    phase = type(one).Phase.Name(one.phase)
    lines = [
        f"{one.graph}/{one.node}: {phase}, '{one.candidate}' has {share}{steps} (revision {one.revision})",
        f"  {one.verdict}",
    ]
    for name, arm in (("candidate", one.candidate_arm), ("baseline", one.baseline_arm)):
        lines.append(
            f"  {name:<10}{arm.num_requests:>9} requests {arm.num_errors:>7} errors   p50 {arm.p50_ms:.1f} ms   "
            f"p99 {arm.p99_ms:.1f} ms"
        )
    for guard in one.guard:
        bounds = "" if math.isnan(guard.lower) else f", between {guard.lower:.4g} and {guard.upper:.4g}"
        broken = " BROKEN" * guard.is_broken
        lines.append(f"  {guard.limit} {guard.allowed:g}: {guard.measured:.4g} measured{bounds}{broken}")
    return "\n".join([*lines, f"  decided by {one.owner}" if one.owner else "  nobody decides now"])
