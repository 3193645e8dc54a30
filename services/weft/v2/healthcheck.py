"""``python -m weft.v2.healthcheck HOST:PORT``: exit status 0 if the service is SERVING; for container images."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from weft.base.errors import WeftError
from weft.base.security.arguments import add_channel_arguments
from weft.v2.client.channels import open_channel
from weft.v2.protocol.services import HEALTH, HealthCheckRequest, HealthCheckResponse, stub_of
from weft.v2.security.channel import ChannelSecurity, channel_security
from weft.wire.interface import grpc

_TIMEOUT_S = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check health; returns 0 if SERVING, 1 if not or unreachable, 2 for invalid usage."""
    parser = argparse.ArgumentParser(prog="python -m weft.v2.healthcheck", description="Ask a service for health.")
    parser.add_argument("address", metavar="HOST:PORT")
    add_channel_arguments(parser, takes_key=False)
    try:
        options = parser.parse_args(arguments)
        security = channel_security(options)
    except SystemExit as end:
        return 2 if end.code else 0
    except WeftError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    try:
        return asyncio.run(_check(options.address, security))
    except WeftError as error:  # an address that needs what is not installed
        sys.stderr.write(f"{error.message}\n")
        return 2


async def _check(address: str, security: ChannelSecurity | None) -> int:
    async with open_channel(address, security=security) as channel:
        try:
            answer = await stub_of(channel, HEALTH).Check(HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"{address} does not answer: {error.code().name}\n")
            return 1
    if answer.status != HealthCheckResponse.SERVING:
        sys.stderr.write(f"{address} answers {HealthCheckResponse.ServingStatus.Name(answer.status)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
