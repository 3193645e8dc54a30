"""Signatures of the models that run, asked of a router or of the services."""

from collections.abc import Iterable

import grpc

from weft_common.client.channels import open_channel
from weft_common.errors import UnsupportedError
from weft_common.protocol.status import from_rpc_error
from weft_common.security.channel import ChannelSecurity
from weft_protos import graph_service_pb2 as pb
from weft_protos.graph_service_pb2_grpc import GraphServiceStub
from weft_router.repository.signatures import signatures_of
from weft_router.targets.catalog import TargetCatalog
from weft_router.targets.grpc_target import GrpcTarget

_TIMEOUT_S = 10.0


async def signatures_of_router(address: str, security: ChannelSecurity | None) -> pb.TargetSignaturesResponse:
    """What the models of a router's targets take and give, as the router knows it.

    Raises:
        UnsupportedError: The server at the address is no router of Weft.
        RemoteError: It does not answer, or refuses.
    """
    async with open_channel(address, security=security) as channel:
        try:
            found: pb.TargetSignaturesResponse = await GraphServiceStub(channel).TargetSignatures(
                pb.TargetSignaturesRequest(), timeout=_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                text = f"'{address}' is no router of Weft; give each service with --target NAME=ADDRESS"
                raise UnsupportedError(text) from error
            raise from_rpc_error(error, f"'{address}'") from error
    return found


async def signatures_of_targets(
    targets: Iterable[tuple[str, str]], security: ChannelSecurity | None
) -> pb.TargetSignaturesResponse:
    """What the models of these targets, name and address of each, take and give."""
    catalog = TargetCatalog([GrpcTarget(name, address, security=security) for name, address in targets])
    try:
        await catalog.start()
        return signatures_of(catalog)
    finally:
        await catalog.close()
