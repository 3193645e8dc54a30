"""Where the services of a mesh listen beside their ports."""

from pathlib import Path

from weft.mesh.preflight import socket_paths
from weft.v2.server.unix_socket import MAX_PATH_BYTES


def test_each_service_has_a_socket_of_its_own(tmp_path: Path) -> None:
    """In the folder, by the service's name."""
    paths = socket_paths(tmp_path, ["model", "preprocess"])
    assert {"model": tmp_path / "model.sock", "preprocess": tmp_path / "preprocess.sock"} == paths


def test_none_has_one_where_the_folder_is_too_deep(tmp_path: Path) -> None:
    """The mesh then does without: half of its services on sockets would surprise."""
    folder = tmp_path / ("d" * (MAX_PATH_BYTES - len(str(tmp_path)) - len("//model.sock")))
    folder.mkdir()
    assert ["model"] == list(socket_paths(folder, ["model"]))
    assert {} == socket_paths(folder, ["model", "preprocess"])
