"""``weft rollback``: puts back what a graph served before its files changed."""

import argparse
import asyncio
import sys

from weft_common.client.v2_client import V2Client
from weft_common.errors import WeftError
from weft_common.security.channel import channel_security

_TIMEOUT_S = 60.0


def run(options: argparse.Namespace) -> int:
    """Print the versions that serve now and return 0, or print the error's status and message and return 1."""
    try:
        versions = asyncio.run(_rollback(options))
    except WeftError as error:
        print(f"weft: {error.code}: {error.message}", file=sys.stderr)
        return 1
    print(f"{options.graph}: version{'s' * (len(versions) > 1)} {', '.join(versions)}")
    return 0


async def _rollback(options: argparse.Namespace) -> list[str]:
    async with V2Client(options.url, security=channel_security(options)) as router:
        await router.load(options.graph, {"rollback": True}, timeout_s=_TIMEOUT_S)
        index = await router.index(ready_only=True, timeout_s=_TIMEOUT_S)
    return [model.version for model in index if model.name == options.graph]
