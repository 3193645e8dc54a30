"""Every control RPC as its users call it: tritonclient's blocking and asyncio clients, and plain stubs."""

import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from google.protobuf import message_factory, text_format
from google.protobuf.json_format import MessageToDict
from tests.wire.notation import Case, read_cases
from tritonclient.utils import InferenceServerException

from weft.base.errors import ResourceExhaustedError
from weft.v2.server.servicer import EXTENSIONS, V2Servicer
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceServicer as Generated

METHODS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name

CONTROL_RPCS = {
    "ServerReady": pb.ServerReadyRequest(),
    "ModelReady": pb.ModelReadyRequest(name="echo"),
    "ModelMetadata": pb.ModelMetadataRequest(name="echo"),
    "ModelConfig": pb.ModelConfigRequest(name="echo"),
    "ModelStatistics": pb.ModelStatisticsRequest(name="echo"),
    "RepositoryIndex": pb.RepositoryIndexRequest(),
    "RepositoryModelLoad": pb.RepositoryModelLoadRequest(model_name="echo"),
    "RepositoryModelUnload": pb.RepositoryModelUnloadRequest(model_name="echo"),
}


@pytest.fixture(params=["blocking", "asyncio"])
async def client(request, address):
    """A function that calls a method of tritonclient by name, with either of its clients."""
    if request.param == "asyncio":
        async with tritonclient.grpc.aio.InferenceServerClient(address) as aio_client:
            yield lambda method, *args, **kwargs: getattr(aio_client, method)(*args, **kwargs)
    else:
        with tritonclient.grpc.InferenceServerClient(address) as sync_client:
            yield lambda method, *args, **kwargs: asyncio.to_thread(getattr(sync_client, method), *args, **kwargs)


@pytest.mark.parametrize("case", read_cases(Path(__file__).with_name("rpcs.txt")), ids=lambda case: case.name)
async def test_rpc(stub, core, case: Case):
    """A control RPC answers or fails as the case says."""
    core.ready = "unready" not in case.lines
    (line,) = case.starting_with("call")
    name, _, request = line.partition(" ")
    method = METHODS[name]
    call = getattr(stub, name)(text_format.Parse(request, message_factory.GetMessageClass(method.input_type)()))
    for expected in case.starting_with("fails"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert f"{caught.value.code().name} {caught.value.details()}".startswith(expected)
        return
    (expected,) = case.starting_with("answer")
    assert text_format.Parse(expected, message_factory.GetMessageClass(method.output_type)()) == await call


async def test_every_call_of_tritonclient(client, core):
    """Its blocking client and that on asyncio understand the answer of each RPC; "statistics" is for perf_analyzer."""
    assert (True, True) == (await client("is_server_live"), await client("is_server_ready"))
    assert (True, False) == (await client("is_model_ready", "echo"), await client("is_model_ready", "hang", "1"))
    metadata = await client("get_server_metadata", as_json=True)
    assert ("weft.test", list(EXTENSIONS)) == (metadata["name"], metadata["extensions"])
    assert metadata["version"]
    assert "statistics" in EXTENSIONS
    assert ["1", "3"] == (await client("get_model_metadata", "echo", as_json=True))["versions"]
    assert 8 == (await client("get_model_config", "echo", as_json=True))["config"]["max_batch_size"]
    assert "no model file" == MessageToDict(await client("get_model_repository_index"))["models"][2]["reason"]
    assert {} == await client("get_system_shared_memory_status", as_json=True)
    assert {} == await client("get_cuda_shared_memory_status", as_json=True)
    settings = (await client("get_trace_settings", "echo")).settings
    assert {"trace_mode", "trace_level", "trace_rate", "trace_count", "log_frequency"} == set(settings)
    assert (["opentelemetry"], ["OFF"]) == (settings["trace_mode"].value, settings["trace_level"].value)
    logs = (await client("get_log_settings", as_json=True))["settings"]
    keys = {"log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"}
    assert keys == set(logs)
    assert ({"bool_param": True}, {"string_param": "default"}) == (logs["log_error"], logs["log_format"])
    stats = (await client("get_inference_statistics")).model_stats  # without a name all models
    assert [entry.name for entry in core.counters] == [entry.name for entry in stats]
    await client("load_model", "echo", config="{}", files={"file:1/m": b"\x00"})
    await client("unload_model", "echo")
    await client("unload_model", "echo", unload_dependents=True)
    loaded = ("load", "echo", {"config": "{}", "file:1/m": b"\x00"})
    assert [loaded, ("unload", "echo", False), ("unload", "echo", True)] == core.loads
    with pytest.raises(InferenceServerException) as caught:
        await client("get_model_metadata", "foo")
    assert ("StatusCode.NOT_FOUND", "Request for unknown model: 'foo' is not found") == (
        caught.value.status(),
        caught.value.message(),
    )


async def test_statistics_keep_every_figure(client, core):
    """Each counter arrives in its own field and batch sizes ascend."""
    (entry,) = (await client("get_inference_statistics", "echo")).model_stats
    counters = core.counters[0]
    assert ("echo", "3") == (entry.name, entry.version)
    assert (counters.last_inference_ms, counters.inference_count, counters.execution_count) == (
        entry.last_inference,
        entry.inference_count,
        entry.execution_count,
    )
    for field in pb.InferStatistics.DESCRIPTOR.fields:
        ours, sent = getattr(counters, field.name), getattr(entry.inference_stats, field.name)
        assert (ours.count, ours.total_ns) == (sent.count, sent.ns), field.name
    assert [1, 8] == [batch.batch_size for batch in entry.batch_stats]
    for sent in entry.batch_stats:
        for name in ("compute_input", "compute_infer", "compute_output"):
            ours = getattr(counters.batches[sent.batch_size], name)
            assert (ours.count, ours.total_ns) == (getattr(sent, name).count, getattr(sent, name).ns), name


async def test_infer(client):
    """An inference by tritonclient returns what was sent, with its id."""
    tensor = tritonclient.grpc.InferInput("x", [1, 3], "INT32")
    tensor.set_data_from_numpy(np.array([[1, -2, 3]], dtype=np.int32))
    words = tritonclient.grpc.InferInput("s", [1, 2], "BYTES")
    words.set_data_from_numpy(np.array([["", "wörd"]], dtype=np.object_))
    result = await client("infer", "echo", [tensor, words], request_id="9", priority=2, timeout=1000)
    assert ("9", [[1, -2, 3]]) == (result.get_response().id, result.as_numpy("x").tolist())
    assert [[b"", "wörd".encode()]] == result.as_numpy("s").tolist()


async def test_parameters_reach_the_core_as_plain_values(client, core):
    """Priority, timeout, sequence and custom parameters arrive with their types."""
    tensor = tritonclient.grpc.InferInput("x", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[1]], dtype=np.int32))
    custom = {"a": 1, "b": True, "c": "text"}
    await client(
        "infer", "echo", [tensor], priority=2, timeout=1000, sequence_id=5, sequence_start=True, parameters=custom
    )
    sequence = {"sequence_id": 5, "sequence_start": True, "sequence_end": False}
    assert {"priority": 2, "timeout": 1000, **sequence, **custom} == core.calls[0][0].parameters


@pytest.mark.parametrize("rpc", CONTROL_RPCS)
async def test_control_rpc_fails_as_the_core_does(stub, core, caplog, rpc):
    """The core's error is the status with its metadata; an exception is INTERNAL with an id in the log and no text."""

    async def failure(error):
        core.control_error = error
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, rpc)(CONTROL_RPCS[rpc])
        return caught.value.code().name, caught.value.details(), dict(caught.value.trailing_metadata())  # type: ignore[arg-type]

    code, details, trailing = await failure(ResourceExhaustedError("full", retry_after_ms=7))
    assert ("RESOURCE_EXHAUSTED", "full", "7") == (code, details, trailing["retry-after-ms"])
    code, details, trailing = await failure(ValueError("secret"))
    model = " on model 'echo'" if "Model" in rpc else ""
    assert ("INTERNAL", f"weft.test failed{model} (error id {trailing['x-error-id']})") == (code, details)
    assert [trailing["x-error-id"]] == [record.error_id for record in caplog.records]


def test_every_rpc_of_the_protocol_is_implemented():
    """No RPC is left to the generated class, which would answer UNIMPLEMENTED."""
    assert [] == [name for name in METHODS if getattr(V2Servicer, name) is getattr(Generated, name)]


async def test_the_argument_of_a_sampler_that_is_not_used(client, monkeypatch):
    """Where no traces are exported it may be that of another program's sampler, which is no number."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "endpoint=http://127.0.0.1:14250")
    assert ["1"] == (await client("get_trace_settings")).settings["trace_rate"].value
