"""What can be known to be wrong before any process is started."""

import errno
import socket
from collections.abc import Sequence
from pathlib import Path


class MeshError(Exception):
    """The mesh cannot serve; the message says which part, why, and the cure."""


def check_repository(repository: Path, services: Sequence[str]) -> None:
    """The repository has graphs and models, and each model has a version folder with something in it.

    Args:
        repository: Folder with the folders ``graphs`` and those of the services.
        services: Names of the folders that hold models.

    Raises:
        MeshError: It does not; every model without files is named.
    """
    if not (repository / "graphs").is_dir() or not any((repository / service).is_dir() for service in services):
        raise MeshError(
            f"'{repository}' is no model repository: it needs a folder 'graphs' and at least one of "
            f"{', '.join(services)}; give one with --repository"
        )
    empty = [
        f"{service}/{config.parent.name}"
        for service in services
        for config in sorted((repository / service).glob("*/config.pbtxt"))
        if not any(_is_version(folder) and any(folder.iterdir()) for folder in config.parent.iterdir())
    ]
    if empty:
        raise MeshError(f"no model files for {', '.join(empty)} in '{repository}': run `make models` to build them")


def _is_version(folder: Path) -> bool:
    return folder.name.isdigit() and folder.is_dir()


def check_port(host: str, port: int) -> None:
    """The port is free to listen on; 0 always is.

    Raises:
        MeshError: It is in use, not allowed, or the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's TIME_WAIT is no user
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise MeshError(
                f"port {port} on {host} is in use: stop what listens there, or choose others with --router-port and "
                "--metrics-port (0 is any free port)"
            ) from error
        raise MeshError(f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error
