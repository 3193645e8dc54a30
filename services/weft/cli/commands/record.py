"""``weft record``: starts, shows and ends recordings of requests and answers at a router."""

import argparse
import asyncio
import json
from functools import partial
from typing import Any

from google.protobuf.json_format import MessageToDict

from weft.base.errors import InvalidArgumentError
from weft.base.text.argument_types import add, positive
from weft.cli.arguments import add_json_argument, add_router_arguments, seconds
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security
from weft_protos import graph_service_pb2 as pb

_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft record``."""
    option = partial(add, parser)
    parser.description = "Record a share of a graph's requests and answers, in files at its router (--record-dir)."
    parser.epilog = "example: weft record triage --percent 5 --for 10m --hash TEXT"
    option("graph GRAPH", "required to start", nargs="?", default="")
    option("--percent P (5)", "share of the requests, drawn at random", positive)
    option("--for TIME", "such as 90s, 10m or 2h, after which it ends; default: the router's --record-max-s", seconds)
    option("--max-mib N", "size at which it ends; default: the router's --record-max-mib", positive)
    option("--omit NAME ...", "leave out this tensor, header or parameter")
    option("--hash NAME ...", "replace it by a keyed hash: equal values stay equal, and nobody can look them up")
    what = partial(add, parser.add_mutually_exclusive_group())
    what("--status", "show recordings, of all graphs without GRAPH")
    what("--stop", "end them")
    add_router_arguments(parser)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print how recordings stand and return 0; raises WeftError."""
    found = asyncio.run(_answer(options))
    if options.json:
        print(json.dumps([_facts(one) for one in found]))
        return 0
    for one in found:
        state = f"{one.percent:g} % are recorded" if one.is_running else f"ended: {one.end_reason}"
        print(f"{one.graph}: {state}; {one.num_requests:,} requests, {one.num_bytes / (1 << 20):.1f} MiB", end="")
        print(f", {one.num_dropped:,} dropped" if one.num_dropped else "")
        for file in one.file:
            print(f"  {file}")
    return 0


def _facts(status: pb.RecordingStatus) -> dict[str, Any]:
    return MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


async def _answer(options: argparse.Namespace) -> list[pb.RecordingStatus]:
    request = pb.RecordingRequest(action="STOP" if options.stop else "STATUS", graph=options.graph)
    if not (options.stop or options.status):
        if not options.graph:
            raise InvalidArgumentError("name the graph to record, or give --status or --stop")
        request = pb.RecordingRequest(
            action="START",
            graph=options.graph,
            percent=options.percent,
            max_s=vars(options)["for"] or 0,
            max_bytes=int((options.max_mib or 0) * (1 << 20)),
            omit=options.omit,
            hash=options.hash,
        )
    async with V2Client(options.url, security=channel_security(options)) as router:
        async with router.names_similar_models(options.graph):
            response = await router.graph_service("Recording", request, timeout_s=_TIMEOUT_S)
    return list(response.recording)
