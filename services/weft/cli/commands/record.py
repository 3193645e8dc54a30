"""``weft record``: starts, shows and ends recordings of requests and answers at a router."""

import argparse
import asyncio
import json
from functools import partial

from weft.base.errors import InvalidArgumentError
from weft.base.text.argument_types import add, positive
from weft.cli.arguments import add_json_argument, add_router_arguments, seconds
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security
from weft_protos import graph_service_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft record``."""
    option = partial(add, parser)
    parser.description = "Record a share of a graph's requests and answers, in files at its router (--record-dir)."
    parser.epilog = "example: weft record triage --percent 5 --for 10m --hash TEXT"
    option("graph GRAPH", "may be left out for --status and --stop", nargs="?", default="")
    option("--percent P (5)", "share of the requests, drawn at random", positive)
    option("--for TIME", "such as 90s, 10m or 2h, after which it ends; default: the router's --record-max-s", seconds)
    option("--max-mib N", "size at which it ends; default: the router's --record-max-mib", positive)
    option("--omit NAME ...", "leave out this tensor, header or parameter")
    option("--hash NAME ...", "replace it by a keyed hash: equal values stay equal, and nobody can look them up")
    option("--status", "show recordings")
    option("--stop", "end them")
    add_router_arguments(parser)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print how recordings stand and return 0; raises WeftError."""
    request = pb.RecordingRequest(graph=options.graph)
    if not (options.stop or options.status):
        if not options.graph:
            raise InvalidArgumentError("name the graph to record, or give --status or --stop")
        request.action, request.percent = request.START, options.percent
        request.max_s, request.max_bytes = vars(options)["for"] or 0, int((options.max_mib or 0) * (1 << 20))
        request.omit.extend(options.omit)
        request.hash.extend(options.hash)
    found = asyncio.run(_answers(options, request))
    if options.json:
        names = [field.name for field in pb.RecordingStatus.DESCRIPTOR.fields]
        print(json.dumps([{name: getattr(one, name) for name in names} | {"file": [*one.file]} for one in found]))
        return 0
    for one in found:
        state = f"{one.percent:g} % of the requests" if one.is_running else f"ended, {one.end_reason}"
        counts = f"{one.num_requests:,} recorded, {one.num_dropped:,} dropped, {one.num_bytes / (1 << 20):.1f} MiB"
        print("\n  ".join([f"{one.graph}: {state}; {counts}", *one.file]))
    return 0


async def _answers(options: argparse.Namespace, request: pb.RecordingRequest) -> list[pb.RecordingStatus]:
    client = V2Client(options.url, security=channel_security(options))
    async with client as router, router.names_similar_models(options.graph):
        ask = partial(router.graph_service, "Recording", timeout_s=30.0)
        found = list((await ask(request)).recording)
        if options.stop:
            requests = [pb.RecordingRequest(action=request.STOP, graph=one.graph) for one in found if one.is_running]
            found = [(await ask(one)).recording[0] for one in requests]
        return found
