"""A Unix socket beside the ports: who may connect, what is left behind, what is there already."""

import os
import socket
import stat

import grpc
import pytest

from weft.base.errors import UnavailableError
from weft.v2.server.unix_socket import MAX_PATH_BYTES, UnixSocket, address_of, path_fault
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


def live_at(path):
    """Whether a service answers there."""
    with grpc.insecure_channel(address_of(path)) as channel:
        return GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=10).live


def test_socket_is_its_users_alone_replaces_a_dead_one_and_goes(start_at, tmp_path):
    """Mode 0600 while a service is there; what kill -9 leaves is replaced by the next one, which leaves nothing."""
    path = tmp_path / "a b%.sock"
    process = start_at(path)
    assert live_at(path)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    process.kill()
    process.wait(20)
    assert path.is_socket()
    process = start_at(path)
    assert live_at(path)
    process.terminate()
    assert 0 == process.wait(20)
    assert [] == list(tmp_path.iterdir())


def test_socket_in_use_is_refused_unless_it_is_taken_over(start_at, tmp_path):
    """Another process ends with status 1 and the reason; with ``--take-over`` callers reach it, also in the end."""
    path = tmp_path / "s"
    first = start_at(path)
    second = start_at(path)
    assert (1, "") == (second.wait(20), second.line)
    assert f"another process listens on '{path}'; stop it, or choose another path" in second.stderr.read()
    assert live_at(path)
    start_at(path, "--take-over")
    assert live_at(path)
    first.terminate()
    assert 0 == first.wait(20)
    assert live_at(path)


def test_file_that_is_no_socket_stays(tmp_path):
    """It is not replaced; the message says what is wrong."""
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(UnavailableError, match="is there and is no socket; choose another path"):
        UnixSocket(path).add_to(None)
    assert "precious" == path.read_text()


def test_path_that_linux_cannot_take_is_told(tmp_path):
    """The message has both numbers; a path of the allowed length can be bound, under its first name too."""
    room = MAX_PATH_BYTES - len(os.fsencode(tmp_path)) - 1
    assert "" == path_fault(tmp_path / ("x" * room))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{tmp_path / ('x' * room)}.4194304")
    fault = path_fault(tmp_path / ("x" * (room + 1)))
    assert f"has {MAX_PATH_BYTES + 1} bytes; give one of at most {MAX_PATH_BYTES}" in fault


def test_path_with_a_comma_is_told(tmp_path):
    """A service could listen there, and nobody could call it."""
    assert "has a comma" in path_fault(tmp_path / "a,b.sock")
    assert not path_fault(tmp_path / "a b%20#?ü.sock")


def test_missing_folder_is_told(tmp_path):
    """It is not made: who makes it says who may look into it."""
    with pytest.raises(UnavailableError, match="there is no folder"):
        UnixSocket(tmp_path / "none" / "s").add_to(None)
