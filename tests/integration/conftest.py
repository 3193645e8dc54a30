"""The sample mesh, started once for all integration tests, as a user starts it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from tritonclient import grpc as triton

from weft.base.processes.process import Endpoint
from weft.mesh.running import running_mesh
from weft.v2.client.channels import channel_options
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


@pytest.fixture(scope="session")
def repository() -> Path:
    """The sample repository, built."""
    return Path(__file__).resolve().parents[2] / "model_repository"


@pytest.fixture(scope="session")
def mesh(repository: Path) -> Iterator[Mapping[str, Endpoint]]:
    """Endpoints of the sample mesh by service; shared, so a test must leave it as it found it."""
    with running_mesh(repository) as endpoints:
        yield endpoints


@pytest.fixture
def client(mesh: Mapping[str, Endpoint]) -> Iterator[triton.InferenceServerClient]:
    """A tritonclient on the router."""
    with triton.InferenceServerClient(mesh["router"].grpc) as connected:
        yield connected


@pytest.fixture
def stub(mesh: Mapping[str, Endpoint]) -> Iterator[GRPCInferenceServiceStub]:
    """A raw stub on the router, for requests that tritonclient would not send."""
    with grpc.insecure_channel(mesh["router"].grpc, options=channel_options()) as channel:
        yield GRPCInferenceServiceStub(channel)
