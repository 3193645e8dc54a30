"""How the services of one mesh reach one another when clients need TLS or keys."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.base.security.keys import new_key
from weft.mesh.preflight import MeshError, socket_paths
from weft.mesh.service_names import ROUTER
from weft.v2.security.channel import ChannelSecurity
from weft.v2.server.unix_socket import address_of

#: Names of the keys: of the services at the router, and of the router at the services.
_MESH, _ROUTER = "mesh", "mesh-router"


class InternalAccess(NamedTuple):
    """The ways between the processes of a mesh that nobody else has.

    Attributes:
        address: Of the router.
        router_arguments, service_arguments: Open the router's door to the services, and theirs to it.
        security: With which this process calls the router; None: no key is needed.
        service_security: With which this process calls the services.
    """

    address: str
    router_arguments: Sequence[str] = ()
    service_arguments: Sequence[str] = ()
    security: ChannelSecurity | None = None
    service_security: ChannelSecurity | None = None


def internal_access(
    folder: Path, address: str, services: Iterable[str], *, is_encrypted: bool, asks_for_keys: bool
) -> InternalAccess:
    """A Unix socket in place of TLS, and keys of the mesh's own, new in each run.

    The services have one key for the router, and the router has another for the services. The arguments name files, and
    those of the router name its targets too, so that no other target is sent the key.

    Args:
        folder: Readable to this user alone.
        address: Of the router, for clients.
        services: Targets of the router that are processes of this mesh.
        is_encrypted, asks_for_keys: What the router requires of clients.

    Raises:
        MeshError: The name of ``folder`` is too long for a socket.
    """
    router_arguments: list[str] = []
    service_arguments: list[str] = []
    security = service_security = None
    if is_encrypted:
        path = socket_paths(folder, [ROUTER]).get(ROUTER)
        if path is None:
            raise MeshError(f"no Unix socket fits into '{folder}', which --tls-cert needs; set a shorter TMPDIR")
        router_arguments.append(f"--unix-socket={path}")
        address = address_of(path)
    if asks_for_keys:
        keys_file, key_file = _new_key(folder, _MESH)
        router_arguments.append(f"--auth-keys={keys_file}")
        service_arguments.append(f"--router-key-file={key_file}")
        security = ChannelSecurity(key_file=key_file)
        keys_file, key_file = _new_key(folder, _ROUTER, control=True)
        service_arguments.append(f"--auth-keys={keys_file}")
        router_arguments += [f"--target-key-file={name}={key_file}" for name in services]
        service_security = ChannelSecurity(key_file=key_file)
    return InternalAccess(address, router_arguments, service_arguments, security, service_security)


def _new_key(folder: Path, name: str, *, control: bool = False) -> tuple[Path, Path]:
    key, line = new_key(name)
    line = json.dumps(json.loads(line) | {"control": control})
    paths = folder / f"{name}.keys", folder / f"{name}.key"
    for path, text in zip(paths, (line, key), strict=True):
        path.touch(0o600)
        path.write_text(text + "\n", encoding="utf-8")
    return paths
