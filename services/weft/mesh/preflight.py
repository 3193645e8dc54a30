"""Checks before any process starts: folders, model files, ports."""

import errno
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.base.processes.process import reserve_port
from weft.base.repository.layout import folders_of_models, has_files, is_model_folder, runs_in_router
from weft.mesh.service_names import GRAPHS
from weft.v2.server.unix_socket import path_fault


class MeshError(Exception):
    """The mesh cannot serve; the message says which part, why, and the cure."""


def service_folders(repository: Path, services: Sequence[str]) -> dict[str, Path]:
    """The folder of each service, by its name, and of the router, by ``GRAPHS``; only those that exist.

    A repository as of Triton Inference Server, models and ensembles side by side, belongs to the model service and to
    the router.

    Args:
        repository: Folder with the folder ``GRAPHS`` and those of the services, or with models.
        services: Names of the folders that hold models.

    Raises:
        MeshError: It is neither, or not one of its models has files.
    """
    folders = folders_of_models(repository, (*services, GRAPHS))
    has_services = GRAPHS in folders and len(folders) > 1
    if not has_services and repository.is_dir() and any(map(is_model_folder, repository.iterdir())):
        folders = {"model": repository, GRAPHS: repository}
    if GRAPHS not in folders or len(folders) == 1:
        raise MeshError(
            f"'{repository}' is no model repository: it needs a folder '{GRAPHS}' and at least one of "
            f"{', '.join(services)}, or models side by side as Triton Inference Server has them; give one with "
            "--repository"
        )
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
    """Unix sockets of services, beside their ports; none where the folder's path is too long for a socket."""
    paths = {name: folder / f"{name}.sock" for name in services}
    return {} if any(map(path_fault, paths.values())) else paths


def check_port(host: str, port: int) -> None:
    """Check that the port is free; 0 always is. Raises MeshError as ``hold_port``."""
    hold_port(host, port).close()


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that reserves the port, or a free one if it is 0, until it is closed.

    Raises:
        MeshError: It is in use, not allowed, or the host is not an address of this machine.
    """
    try:
        return reserve_port(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise MeshError(
                f"port {port} on {host} is in use: stop what listens there, or choose others with --router-port, "
                "--metrics-port and --http-port (0 is any free port)"
            ) from error
        raise MeshError(f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error
