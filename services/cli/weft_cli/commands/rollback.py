"""``weft rollback``: what a graph served before its files changed serves again."""

import argparse
import asyncio
import sys

import grpc

from weft_common.client.channels import open_channel
from weft_common.errors import WeftError
from weft_common.protocol.status import from_rpc_error
from weft_common.security.channel import channel_security
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

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
    request = pb.RepositoryModelLoadRequest(model_name=options.graph)
    request.parameters["rollback"].bool_param = True
    async with open_channel(options.url, security=channel_security(options)) as channel:
        stub = GRPCInferenceServiceStub(channel)
        try:
            await stub.RepositoryModelLoad(request, timeout=_TIMEOUT_S)
            index = await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"'{options.url}'") from error
    return [model.version for model in index.models if model.name == options.graph]
