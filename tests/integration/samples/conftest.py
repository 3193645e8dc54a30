"""The sample mesh, started once for all tests of this folder, as a user starts it; one worker runs them all."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from tests.conftest import OtlpCollector, collecting
from tritonclient import grpc as triton

from weft.base.processes.process import Endpoint
from weft.mesh.running import running_mesh
from weft.v2.client.channels import channel_options
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


class Samples(NamedTuple):
    """The running mesh, and the spans of those requests to it whose client asks for it, and of those that fail."""

    endpoints: Mapping[str, Endpoint]
    spans: OtlpCollector


@pytest.fixture(scope="session")
def samples(repository: Path) -> Iterator[Samples]:
    """They last for the session; what is told to them by the environment is not told to what later tests start."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        with collecting(environment) as spans, running_mesh(repository, ["--openai-port", "0"]) as endpoints:
            environment.undo()
            yield Samples(endpoints, spans)


@pytest.fixture(scope="session")
def collector(samples: Samples) -> OtlpCollector:
    """Gets the spans of the sample mesh."""
    return samples.spans


@pytest.fixture(scope="session")
def mesh(samples: Samples) -> Mapping[str, Endpoint]:
    """Endpoints of the sample mesh by service; shared, so a test must leave it as it found it."""
    return samples.endpoints


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
