"""Checks before any process starts (folders, model files, ports), and private access between services."""

import errno
import json
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.base.errors import NotFoundError
from weft.base.processes.process import reserve_port
from weft.base.repository.layout import has_files, runs_in_router, served_folders, twice_named
from weft.base.security.keys import new_key
from weft.mesh.service_names import GRAPHS, ROUTER
from weft.v2.security.channel import ChannelSecurity
from weft.v2.server.unix_socket import address_of, path_fault


class MeshError(Exception):
    """The mesh cannot serve; the message says which part, why, and the cure."""


def service_folders(repository: Path, services: Sequence[str]) -> dict[str, Path]:
    """As ``served_folders``. Raises MeshError, also if no model has files, or two have one name."""
    try:
        folders = served_folders(repository, services, GRAPHS)
    except NotFoundError as error:
        raise MeshError(error.message) from None
    for fault in twice_named(folder for name, folder in folders.items() if name != GRAPHS).values():
        raise MeshError(fault)
    models = [
        config.parent
        for name, folder in folders.items()
        for config in sorted(folder.glob("*/config.pbtxt"))
        if name != GRAPHS and not runs_in_router(config)
    ]
    if models and not any(map(has_files, models)):
        empty = ", ".join(str(model.relative_to(repository)) for model in models)
        raise MeshError(f"no model files for {empty} in '{repository}': run `make models` to build them")
    return folders


def socket_paths(folder: Path, services: Iterable[str]) -> dict[str, Path]:
    """Unix sockets of services, besides their ports; none if the folder's path is too long for a socket."""
    paths = {name: folder / f"{name}.sock" for name in services}
    return {} if any(map(path_fault, paths.values())) else paths


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that reserves the port, or a free one if it is 0, until it is closed.

    Raises MeshError if it is in use, not allowed, or the host is not an address of this machine.
    """
    try:
        return reserve_port(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise MeshError(
                f"port {port} on {host} is in use: stop what listens there, or choose others, 0 for any free one "
                "(--router-port, --metrics-port, --http-port)"
            ) from error
        raise MeshError(f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error


#: Names of the keys: of the services at the router, and of the router at the services.
_MESH, _ROUTER = "mesh", "mesh-router"


class InternalAccess(NamedTuple):
    """Private access between the processes of a mesh.

    Attributes:
        address: Of the router.
        router_arguments, service_arguments: Let the services call the router, and the router the services.
        security: For calls from this process to the router; None: no key is needed.
        service_security: For calls from this process to the services.
    """

    address: str
    router_arguments: Sequence[str] = ()
    service_arguments: Sequence[str] = ()
    security: ChannelSecurity | None = None
    service_security: ChannelSecurity | None = None


def internal_access(
    folder: Path, address: str, services: Iterable[str], *, is_encrypted: bool, asks_for_keys: bool
) -> InternalAccess:
    """Create a Unix socket that replaces TLS, and keys for this run.

    The services have one key for the router, and the router has another for the services. The arguments name files, and
    those of the router also its targets, so that no other target gets the key.

    Args:
        folder: Readable to this user alone.
        address: Of the router, for clients.
        services: Targets of the router that are processes of this mesh.
        is_encrypted, asks_for_keys: What the router requires of clients.

    Raises MeshError: the name of ``folder`` is too long for a socket.
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


def write_mesh_key(folder: Path) -> Path:
    """Write the secret that the services of a mesh share, for this run, into ``folder``; returns its file."""
    path = folder / "mesh.secret"
    path.touch(0o600)
    path.write_text(new_key(_MESH)[0] + "\n", encoding="utf-8")
    return path


def _new_key(folder: Path, name: str, *, control: bool = False) -> tuple[Path, Path]:
    key, line = new_key(name)
    line = json.dumps(json.loads(line) | {"control": control})
    paths = folder / f"{name}.keys", folder / f"{name}.key"
    for path, text in zip(paths, (line, key), strict=True):
        path.touch(0o600)
        path.write_text(text + "\n", encoding="utf-8")
    return paths
