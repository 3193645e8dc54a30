"""Whatever a client sends to any RPC of any service: an answer or a plain refusal, soon, and the service lives on."""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.faults.mesh import Service, wait_serving
from tests.fuzz.messages import any_message, infer_requests

from weft_protos import graph_service_pb2, grpc_service_pb2
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

REPOSITORY = Path(__file__).parents[2] / "model_repository"
#: Inputs to each RPC of each service; `make fuzz` asks for many more.
NUM_INPUTS = int(os.environ.get("WEFT_FUZZ_INPUTS", "4"))
#: A call that takes longer hangs.
LIMIT_S = 20.0
#: What a client may be told; everything else is a fault of the service.
FAIR = frozenset({
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "OUT_OF_RANGE", "DEADLINE_EXCEEDED", "CANCELLED",
})  # fmt: skip
KINDS = ("preprocess", "model", "postprocess", "router")
CLOSED = ["--allow-client-shm", "--model-control-mode=explicit", "--load-model=*"]
METHODS = [
    *grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods,
    *graph_service_pb2.DESCRIPTOR.services_by_name["GraphService"].methods,
    *health_pb2.DESCRIPTOR.services_by_name["Health"].methods,
]
#: An example that fails is shown as it was found: making it smaller starts processes for longer than a test may take.
FUZZ = settings(
    max_examples=NUM_INPUTS,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


class Target(NamedTuple):
    """A service and a channel to it."""

    service: Service
    channel: grpc.Channel
    models: dict[str, pb.ModelMetadataResponse]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Target]]:
    """Every service of the sample mesh, with what is closed by default opened."""
    folder = tmp_path_factory.mktemp("fuzz")
    with contextlib.ExitStack() as stack:
        services: dict[str, Service] = {}
        for kind in KINDS:
            home = REPOSITORY / ("graphs" if kind == "router" else kind)
            known = [f"--target={name}={service.address}" for name, service in services.items()]
            known.append(f"--record-dir={folder / 'kept'}")
            arguments = ["--repository", str(home), *CLOSED, *(known if kind == "router" else [])]
            services[kind] = Service(f"weft.services.{kind}", arguments, folder / f"{kind}.log")
            stack.callback(services[kind].end)
            services[kind].start()
            if kind == "postprocess":
                for service in services.values():
                    wait_serving(service.address)
        wait_serving(services["router"].address)
        found = {}
        for kind, service in services.items():
            channel = stack.enter_context(grpc.insecure_channel(service.address))
            found[kind] = Target(service, channel, metadata(channel))
        yield found


@pytest.fixture(scope="module")
def tried() -> Iterator[Counter[str]]:
    """How many inputs each RPC of each service was given; written to the file that WEFT_FUZZ_REPORT names."""
    counts: Counter[str] = Counter()
    yield counts
    if report := os.environ.get("WEFT_FUZZ_REPORT"):
        Path(report).write_text(json.dumps(counts, indent=1, sort_keys=True))


def metadata(channel: grpc.Channel) -> dict[str, pb.ModelMetadataResponse]:
    """Of every model that is ready."""
    stub = GRPCInferenceServiceStub(channel)
    index = stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))
    return {model.name: stub.ModelMetadata(pb.ModelMetadataRequest(name=model.name)) for model in index.models}


def outcome(channel: grpc.Channel, method: MethodDescriptor, requests: list[Message]) -> str:
    """Status of one call with these requests, or the first of them; a watch is left after its first answer."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    path = f"/{method.containing_service.full_name}/{method.name}"
    answer = GetMessageClass(method.output_type).FromString
    call = getattr(channel, kind)(
        path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=answer
    )
    given_requests: Any = iter(requests) if method.client_streaming else requests[0]
    try:
        result = call(given_requests, timeout=LIMIT_S)
        if method.server_streaming:
            for _ in result:
                if method.name == "Watch":
                    result.cancel()
                    break
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def check(target: Target, method: MethodDescriptor, requests: list[Message]) -> None:
    """The call ends as it may; the service answers another one."""
    begin_s = time.monotonic()
    status = outcome(target.channel, method, requests)
    assert status in FAIR, (status, target.service.log.read_text()[-3000:])
    assert time.monotonic() - begin_s < LIMIT_S - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_any_message(targets: Mapping[str, Target], tried: Counter[str], method: MethodDescriptor, kind: str) -> None:
    """Any message of the RPC's type, with names that exist and names that are traps, is answered or refused."""

    @FUZZ
    @given(st.lists(any_message(method.input_type), min_size=1, max_size=3 if method.client_streaming else 1))
    def run(requests: list[Message]) -> None:
        tried[f"{kind} {method.name}"] += 1
        check(targets[kind], method, requests)

    run()


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_nearly_right(targets: Mapping[str, Target], tried: Counter[str], kind: str) -> None:
    """Inference with up to three faults: wrong types, sizes, shapes, names, parameters, pictures, regions."""
    infer = METHODS[[method.name for method in METHODS].index("ModelInfer")]

    @settings(FUZZ, max_examples=NUM_INPUTS * 10)
    @given(infer_requests(targets[kind].models))
    def run(request: pb.ModelInferRequest) -> None:
        tried[f"{kind} ModelInfer, nearly right"] += 1
        check(targets[kind], infer, [request])

    run()


@pytest.mark.parametrize("kind", KINDS)
def test_the_service_is_unharmed(targets: Mapping[str, Target], kind: str) -> None:
    """After all that it lives, it lists its models, and its log has no unexpected error."""
    stub = GRPCInferenceServiceStub(targets[kind].channel)
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=LIMIT_S).live
    assert stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=LIMIT_S).models
    log = targets[kind].service.log.read_text()
    assert "Traceback" not in log
    assert "unexpected error" not in log
