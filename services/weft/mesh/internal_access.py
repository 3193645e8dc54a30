"""How the services of one mesh reach its router when clients need TLS or keys for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from weft.base.security.keys import new_key
from weft.mesh.preflight import MeshError, socket_paths
from weft.mesh.service_names import ROUTER
from weft.v2.security.channel import ChannelSecurity
from weft.v2.server.unix_socket import address_of

_NAME = "mesh"


class AccessRules(Protocol):
    """What the router requires of clients."""

    @property
    def is_encrypted(self) -> bool:
        """TLS."""

    @property
    def asks_for_keys(self) -> bool:
        """Keys."""


class InternalAccess(NamedTuple):
    """The way to the router that only its mesh has.

    Attributes:
        address: Of the router.
        router_arguments: Arguments of the router that open this way.
        service_arguments: Arguments with which services take it.
        security: With which this process takes it; None: no key is needed.
    """

    address: str
    router_arguments: Sequence[str] = ()
    service_arguments: Sequence[str] = ()
    security: ChannelSecurity | None = None


def internal_access(folder: Path, address: str, rules: AccessRules) -> InternalAccess:
    """A Unix socket in place of TLS, and a key of the mesh's own.

    Args:
        folder: Readable to this user alone.
        address: Of the router, for clients.
        rules: What the router requires of clients.

    Raises:
        MeshError: The name of ``folder`` is too long for a socket.
    """
    router_arguments: list[str] = []
    service_arguments: list[str] = []
    security = None
    if rules.is_encrypted:
        path = socket_paths(folder, [ROUTER]).get(ROUTER)
        if path is None:
            raise MeshError(f"no Unix socket fits into '{folder}', which --tls-cert needs; set a shorter TMPDIR")
        router_arguments.append(f"--unix-socket={path}")
        address = address_of(path)
    if rules.asks_for_keys:
        keys_file, key_file = folder / "mesh.keys", folder / "mesh.key"
        key, line = new_key(_NAME)
        keys_file.write_text(line + "\n", encoding="utf-8")
        key_file.touch(0o600)
        key_file.write_text(key + "\n", encoding="utf-8")
        router_arguments.append(f"--auth-keys={keys_file}")
        service_arguments.append(f"--router-key-file={key_file}")
        security = ChannelSecurity(key_file=key_file)
    return InternalAccess(address, router_arguments, service_arguments, security)
