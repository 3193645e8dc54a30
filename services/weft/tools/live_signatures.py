"""Signatures of the models that run, asked of a router or of the services."""

from collections.abc import Iterable

from weft.base.errors import RemoteError, UnsupportedError
from weft.router.repository.config import signatures_of
from weft.router.targets.catalog import TargetCatalog
from weft.router.targets.grpc_target import GrpcTarget
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import ChannelSecurity
from weft_protos import graph_service_pb2 as pb

_TIMEOUT_S = 10.0


async def signatures_of_router(address: str, security: ChannelSecurity | None) -> pb.TargetSignaturesResponse:
    """What the models of a router's targets take and give, as the router knows it.

    Raises:
        UnsupportedError: The server at the address is no router of Weft.
        RemoteError: It does not answer, or refuses.
    """
    async with V2Client(address, security=security) as router:
        try:
            return await router.target_signatures(timeout_s=_TIMEOUT_S)
        except RemoteError as error:
            if error.code == UnsupportedError.code:
                text = f"'{address}' is no router of Weft; give each service with --target NAME=ADDRESS"
                raise UnsupportedError(text) from error
            raise


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
