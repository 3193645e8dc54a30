"""``python -m weft_common.healthcheck HOST:PORT``: exit status 0 if the service is SERVING; for container images."""

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft_common.errors import WeftError
from weft_common.security.arguments import add_channel_arguments
from weft_common.security.channel import ChannelSecurity, channel_security
from weft_common.security.tls import channel_credentials

_TIMEOUT_S = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check health; returns 0 if SERVING, 1 if not or unreachable, 2 for invalid usage."""
    parser = argparse.ArgumentParser(prog="python -m weft_common.healthcheck", description="Ask a service for health.")
    parser.add_argument("address", metavar="HOST:PORT")
    add_channel_arguments(parser, takes_key=False)
    try:
        options = parser.parse_args(arguments)
        channel = _open(options.address, channel_security(options))
    except SystemExit as end:
        return 2 if end.code else 0
    except WeftError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{options.address} does not answer: {error.code().name}\n")
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        sys.stderr.write(f"{options.address} answers {name}\n")
        return 1
    return 0


def _open(address: str, security: ChannelSecurity | None) -> grpc.Channel:
    tls = None if security is None else security.read().tls
    if security is None or tls is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, channel_credentials(tls), security.options)


if __name__ == "__main__":
    sys.exit(main())
