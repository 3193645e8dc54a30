"""The sample mesh, started once for all tests of this folder, as a user starts it; one worker runs them all."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from tests.conftest import OtlpCollector, collecting
from tritonclient import grpc as triton

from weft.base.processes.process import Endpoint
from weft.mesh.running import running_mesh
from weft.v2.client.channels import channel_options
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


@pytest.fixture(scope="session")
def collector() -> Iterator[OtlpCollector]:
    """Gets the spans of those requests to the mesh whose client asks for it, and of those that fail."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        with collecting(environment) as collector:
            yield collector


@pytest.fixture(scope="session")
def mesh(repository: Path, collector: OtlpCollector) -> Iterator[Mapping[str, Endpoint]]:
    """Endpoints of the sample mesh by service; shared, so a test must leave it as it found it."""
    with running_mesh(repository, ["--openai-port", "0"]) as endpoints:
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
