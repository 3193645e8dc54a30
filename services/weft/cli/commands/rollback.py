"""``weft rollback``: restores the graph that was served before its files changed."""

import argparse
import asyncio
import json

from weft.base.text.argument_types import add
from weft.cli.arguments import add_json_argument, add_router_arguments
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security

_TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft rollback``."""
    parser.description = "Put back what a graph served before its files changed, until files are loaded again."
    parser.epilog = "example: weft rollback triage"
    add(parser, "graph GRAPH")
    add_router_arguments(parser)
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the versions that serve now and return 0; raises WeftError."""
    versions = asyncio.run(_rollback(options))
    if options.json:
        print(json.dumps({"graph": options.graph, "versions": versions}))
        return 0
    print(f"{options.graph}: version{'s' * (len(versions) > 1)} {', '.join(versions)}")
    return 0


async def _rollback(options: argparse.Namespace) -> list[str]:
    async with V2Client(options.url, security=channel_security(options)) as router:
        async with router.names_similar_models(options.graph):
            await router.load(options.graph, {"rollback": True}, timeout_s=_TIMEOUT_S)
        index = await router.index(ready_only=True, timeout_s=_TIMEOUT_S)
    return [model.version for model in index if model.name == options.graph]
