"""Checks before anything is started."""

import socket
from pathlib import Path

import pytest

from weft.mesh.preflight import MeshError, hold_port, service_folders, socket_paths, write_mesh_key
from weft.v2.security.channel import read_key
from weft.v2.server.unix_socket import MAX_PATH_BYTES

SERVICES = ("preprocess", "model")


def test_a_port_in_use_is_named_with_the_cure() -> None:
    """The message has the port, the host and the options that choose others."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MeshError, match=f"port {port} on 127.0.0.1 is in use.*--router-port"):
            hold_port("127.0.0.1", port).close()


def test_a_port_that_was_closed_is_free() -> None:
    """A port is free again as soon as its listener has gone, and 0 always is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()
    hold_port("127.0.0.1", port).close()
    hold_port("127.0.0.1", 0).close()


def test_a_held_port_is_for_services_of_the_mesh_alone() -> None:
    """A server that shares no port cannot take it while the service is down, also not with SO_REUSEADDR, as most do."""
    with hold_port("127.0.0.1", 0) as held:
        address = held.getsockname()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        for _ in range(2):  # a service and the one after it
            with socket.create_server(address, reuse_port=True) as service, socket.create_connection(address):
                service.accept()[0].close()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)


def test_a_host_of_another_machine_is_refused() -> None:
    """An address that this machine does not have cannot be listened on."""
    with pytest.raises(MeshError, match=r"cannot listen on 192\.0\.2\.1 port 0"):
        hold_port("192.0.2.1", 0).close()


def test_a_folder_without_graphs_is_no_repository(tmp_path: Path) -> None:
    """The message names the folder and the option."""
    with pytest.raises(MeshError, match=r"is no model repository.*--repository"):
        service_folders(tmp_path, SERVICES)


def test_models_without_files_are_named_with_the_cure(tmp_path: Path) -> None:
    """Every model is named at once where none was ever built; where one was, the services say what the others lack."""
    (tmp_path / "graphs").mkdir()
    for name in ("model/unbuilt", "model/empty/1", "preprocess/notes/docs"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("model/unbuilt", "model/empty", "preprocess/notes"):
        (tmp_path / name / "config.pbtxt").touch()
    with pytest.raises(MeshError) as failure:
        service_folders(tmp_path, SERVICES)
    assert "no model files for preprocess/notes, model/empty, model/unbuilt in" in str(failure.value)
    assert "`make models`" in str(failure.value)
    (tmp_path / "model/empty/1/model.onnx").touch()
    assert {"preprocess", "model", "graphs"} == set(service_folders(tmp_path, SERVICES))


def test_models_and_ensembles_side_by_side(tmp_path: Path) -> None:
    """A repository of Triton Inference Server is the model service's and the router's; an ensemble needs no files."""
    for name, config in (("m", 'backend: "python"'), ("e", 'platform: "ensemble" ensemble_scheduling { }')):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    with pytest.raises(MeshError, match="no model files for m in"):
        service_folders(tmp_path, SERVICES)
    (tmp_path / "m" / "1" / "model.py").touch()
    assert {"model": tmp_path, "graphs": tmp_path} == service_folders(tmp_path, SERVICES)


@pytest.mark.parametrize("name", ["preprocess", "model", "graphs"])
@pytest.mark.parametrize("has_config", [True, False])
def test_models_may_have_the_names_of_services(tmp_path: Path, name: str, has_config: bool) -> None:
    """A folder with a config.pbtxt or a version folder is a model, whatever its name is."""
    for model in (name, "other"):
        (tmp_path / model / "1").mkdir(parents=True)
        (tmp_path / model / "1" / "model.py").touch()
    if has_config:
        (tmp_path / name / "config.pbtxt").write_text('backend: "python"')
    assert {"model": tmp_path, "graphs": tmp_path} == service_folders(tmp_path, SERVICES)


def test_a_repository_without_any_configuration_is_one(tmp_path: Path) -> None:
    """Models are known by their version folders."""
    (tmp_path / "digits" / "1").mkdir(parents=True)
    (tmp_path / "digits" / "1" / "model.onnx").touch()
    assert {"model": tmp_path, "graphs": tmp_path} == service_folders(tmp_path, SERVICES)


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


def test_the_key_of_a_mesh_is_for_this_user_alone(tmp_path: Path) -> None:
    """And another one in each run."""
    (tmp_path / "other").mkdir()
    first, second = (write_mesh_key(folder) for folder in (tmp_path, tmp_path / "other"))
    assert 0o600 == first.stat().st_mode & 0o777
    assert read_key(first) != read_key(second)
