"""How the services of one mesh reach its router when that asks others for TLS or keys."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from weft_common.security.channel import ChannelSecurity
from weft_common.security.keys import new_key
from weft_common.server.unix_socket import address_of
from weft_mesh.preflight import MeshError, socket_paths

_NAME = "mesh"


class Closed(Protocol):
    """What the router asks others for."""

    @property
    def is_encrypted(self) -> bool:
        """TLS."""

    @property
    def asks_for_keys(self) -> bool:
        """Keys."""


class InternalAccess(NamedTuple):
    """A way that only this mesh has.

    Attributes:
        address: Of the router.
        router_arguments: Open it.
        service_arguments: Take it.
        security: Takes it from this process; None: nobody asks for keys.
    """

    address: str
    router_arguments: Sequence[str] = ()
    service_arguments: Sequence[str] = ()
    security: ChannelSecurity | None = None


def internal_access(folder: Path, address: str, closed: Closed) -> InternalAccess:
    """A Unix socket past TLS, a key of its own past keys.

    Args:
        folder: That only this user reads.
        address: Of the router, for everybody.
        closed: What the router asks for.

    Raises:
        MeshError: The name of ``folder`` is too long for a socket.
    """
    router_arguments: list[str] = []
    service_arguments: list[str] = []
    security = None
    if closed.is_encrypted:
        path = socket_paths(folder, ["router"]).get("router")
        if path is None:
            raise MeshError(f"no Unix socket fits into '{folder}', which --tls-cert needs; set a shorter TMPDIR")
        router_arguments.append(f"--unix-socket={path}")
        address = address_of(path)
    if closed.asks_for_keys:
        keys_file, key_file = folder / "mesh.keys", folder / "mesh.key"
        key, line = new_key(_NAME)
        keys_file.write_text(line + "\n", encoding="utf-8")
        key_file.touch(0o600)
        key_file.write_text(key + "\n", encoding="utf-8")
        router_arguments.append(f"--auth-keys={keys_file}")
        service_arguments.append(f"--router-key-file={key_file}")
        security = ChannelSecurity(key_file=key_file)
    return InternalAccess(address, router_arguments, service_arguments, security)
