"""From the command line to targets."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.router.target import Target
from weft.router.targets.addresses import resolve
from weft.router.targets.grpc_target import GrpcTarget
from weft.router.targets.health_watch import watch_health
from weft.router.targets.membership import MembershipSettings, Tell
from weft.router.targets.replicated import ReplicatedTarget
from weft.router.targets.specification import BalancingPolicy, channel_address, channel_options, dns_name
from weft.v2.client.wires import WireName
from weft.v2.security.channel import ChannelSecurity

#: A server that was started again is noticed soon.
_RECONNECT_OPTIONS: list[tuple[str, Any]] = [("grpc.max_reconnect_backoff_ms", 500)]


def make_target(
    name: str,
    address: str,
    policy: BalancingPolicy | None = None,
    security: ChannelSecurity | None = None,
    *,
    wire: WireName | None = None,
) -> Target:
    """The target of ``address``, without a connection yet; on the event loop that uses it.

    Args:
        name: As given to the router.
        address: As of ``parse_target``.
        policy: As of ``parse_policy``, without a ``policy_fault``; None: the default, where there may be replicas.
        security: TLS and key; None: plaintext without a key.
        wire: Implementation of gRPC; None: ``default_wire``.
    """
    host_and_port = dns_name(address)
    if security is not None and security.is_encrypted and host_and_port and not security.server_name:
        security = replace(security, server_name=host_and_port.rpartition(":")[0])  # replicas are called by address
    connected = partial(GrpcTarget, name, security=security, wire=wire)
    is_list = "," in address and not address.startswith(("ipv4:", "ipv6:"))
    if policy is None and not host_and_port and not is_list:
        return connected(address, options=_RECONNECT_OPTIONS)
    policy = policy or BalancingPolicy()
    options = [*_RECONNECT_OPTIONS, *([("grpc.default_authority", host_and_port)] if host_and_port else [])]
    settings = MembershipSettings(
        resolve=partial(resolve, host_and_port) if host_and_port else partial(_given, address.split(",")),
        is_fixed=not host_and_port,
        connect=partial(connected, options=options),
        watch=_watch,
    )
    by_grpc = None
    if policy.is_by_grpc:
        by_grpc = connected(channel_address(address), options=[*_RECONNECT_OPTIONS, *channel_options(policy)])
    return ReplicatedTarget(name, address, policy, settings, by_grpc)


async def _given(addresses: Sequence[str]) -> Sequence[str]:
    return addresses


async def _watch(target: Target, tell: Tell) -> None:
    if isinstance(target, GrpcTarget):
        await watch_health(target.channel, tell)
