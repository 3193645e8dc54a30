"""Every control RPC as its users call it: tritonclient's blocking and asyncio clients, and plain stubs."""

import asyncio

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from weft.base.errors import ResourceExhaustedError
from weft.v2.server.servicer import EXTENSIONS
from weft_protos import grpc_service_pb2 as pb

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


async def refused(call):
    """Status and text of a refusal."""
    with pytest.raises(InferenceServerException) as caught:
        await call
    return caught.value.status(), caught.value.message()


async def test_liveness_and_readiness(client, core):
    """The server is live in any case, and ready when the core is."""
    assert (True, True) == (await client("is_server_live"), await client("is_server_ready"))
    core.ready = False
    assert (True, False) == (await client("is_server_live"), await client("is_server_ready"))


async def test_model_readiness(client):
    """A model is ready or not; an unknown model or version is NOT_FOUND, not false."""
    assert (True, False) == (await client("is_model_ready", "echo"), await client("is_model_ready", "hang", "1"))
    assert ("StatusCode.NOT_FOUND", "Request for unknown model: 'foo' is not found") == await refused(
        client("is_model_ready", "foo")
    )
    assert ("StatusCode.NOT_FOUND", "Request for unknown model: 'echo' version 99 is not found") == await refused(
        client("is_model_ready", "echo", "99")
    )


async def test_server_metadata(client):
    """Name, version and extensions; perf_analyzer needs "statistics" among them."""
    metadata = await client("get_server_metadata", as_json=True)
    assert ("weft.test", list(EXTENSIONS)) == (metadata["name"], metadata["extensions"])
    assert metadata["version"]
    assert "statistics" in EXTENSIONS


@pytest.mark.parametrize(("version", "versions"), [("", ["1", "3"]), ("3", ["3"])])
async def test_model_metadata(client, version, versions):
    """Wire datatypes, a leading -1 for the batch, and every ready version unless one was asked for."""
    expected = {
        "name": "echo",
        "versions": versions,
        "platform": "scripted",
        "inputs": [
            {"name": "x", "datatype": "INT32", "shape": ["-1", "-1"]},
            {"name": "s", "datatype": "BYTES", "shape": ["-1", "1"]},
        ],
        "outputs": [{"name": "x", "datatype": "INT32", "shape": ["-1", "-1"]}],
    }
    assert expected == await client("get_model_metadata", "echo", version, as_json=True)


async def test_model_config(client):
    """The configuration comes with its name."""
    config = await client("get_model_config", "echo", as_json=True)
    assert {"config": {"name": "echo", "backend": "scripted", "max_batch_size": 8}} == config


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


async def test_statistics_of_all_models(client, core):
    """Without a name every model is listed, as perf_analyzer asks for an ensemble."""
    stats = (await client("get_inference_statistics")).model_stats
    assert [entry.name for entry in core.counters] == [entry.name for entry in stats]
    assert "StatusCode.NOT_FOUND" == (await refused(client("get_inference_statistics", "foo")))[0]


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


async def test_repository_index(client):
    """The index lists state and reason of every version."""
    index = MessageToDict(await client("get_model_repository_index"))["models"]
    assert [
        {"name": "echo", "version": "1", "state": "READY"},
        {"name": "echo", "version": "3", "state": "READY"},
        {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "no model file"},
    ] == index


async def test_ready_index_has_ready_versions_only(stub):
    """With ``ready`` only versions that can be called are listed."""
    index = await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))
    assert ["1", "3"] == [entry.version for entry in index.models]


async def test_load_and_unload(client, core):
    """Loading passes configuration and files on; unloading says whether dependents go too."""
    await client("load_model", "echo", config="{}", files={"file:1/m": b"\x00"})
    await client("unload_model", "echo")
    await client("unload_model", "echo", unload_dependents=True)
    assert [
        ("load", "echo", {"config": "{}", "file:1/m": b"\x00"}),
        ("unload", "echo", False),
        ("unload", "echo", True),
    ] == core.loads
    assert "StatusCode.NOT_FOUND" == (await refused(client("load_model", "foo")))[0]
    assert "StatusCode.NOT_FOUND" == (await refused(client("unload_model", "foo")))[0]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("system", "Client shared memory is disabled"), ("cuda", "Client shared memory is disabled")],
)
async def test_shared_memory_is_not_offered(client, kind, reason):
    """Status and unregister succeed with nothing registered, as perf_analyzer calls them; register is UNIMPLEMENTED."""
    assert {} == await client(f"get_{kind}_shared_memory_status", as_json=True)
    await client(f"unregister_{kind}_shared_memory", "")
    await client(f"unregister_{kind}_shared_memory", "r")
    arguments = ("/key", 64) if kind == "system" else (b"", 0, 64)
    status, message = await refused(client(f"register_{kind}_shared_memory", "r", *arguments))
    assert ("StatusCode.UNIMPLEMENTED", reason) == (status, message[: len(reason)])


async def test_trace_settings(client):
    """Settings are readable with the keys that clients know; changing them says how it is done."""
    settings = (await client("get_trace_settings", "echo")).settings
    keys = {"trace_mode", "trace_level", "trace_rate", "trace_count", "log_frequency"}
    assert keys == set(settings)
    assert (["opentelemetry"], ["OFF"]) == (settings["trace_mode"].value, settings["trace_level"].value)
    status, text = await refused(client("update_trace_settings", "echo", {"trace_rate": "5"}))
    assert "StatusCode.UNIMPLEMENTED" == status
    assert "['trace_rate'] cannot be changed while the service runs; set OTEL_" in text


async def test_log_settings(client):
    """Settings are readable with the keys that clients know; changing them says how it is done."""
    settings = (await client("get_log_settings", as_json=True))["settings"]
    keys = {"log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"}
    assert keys == set(settings)
    assert ({"bool_param": True}, {"string_param": "json"}) == (settings["log_error"], settings["log_format"])
    status, text = await refused(client("update_log_settings", {"log_verbose_level": 1}))
    assert "StatusCode.UNIMPLEMENTED" == status
    assert "['log_verbose_level'] cannot be changed while the service runs; start it with --log-level" in text


@pytest.mark.parametrize("rpc", CONTROL_RPCS)
async def test_control_rpc_never_shows_an_exception(stub, core, caplog, rpc):
    """An unexpected exception in any control RPC is INTERNAL with an id that is in the log, without its text."""
    core.control_error = ValueError("secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, rpc)(CONTROL_RPCS[rpc])
    error_id = dict(caught.value.trailing_metadata())["x-error-id"]  # type: ignore[arg-type, index]
    model = " on model 'echo'" if "Model" in rpc else ""
    assert ("INTERNAL", f"weft.test failed{model} (error id {error_id})") == (
        caught.value.code().name,
        caught.value.details(),
    )
    assert [error_id] == [record.error_id for record in caplog.records]


@pytest.mark.parametrize("rpc", CONTROL_RPCS)
async def test_control_rpc_gives_the_cores_error(stub, core, rpc):
    """An error of the core in any control RPC arrives as its status with its metadata."""
    core.control_error = ResourceExhaustedError("full", retry_after_ms=7)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(stub, rpc)(CONTROL_RPCS[rpc])
    assert ("RESOURCE_EXHAUSTED", "full") == (caught.value.code().name, caught.value.details())
    assert "7" == dict(caught.value.trailing_metadata())["retry-after-ms"]  # type: ignore[arg-type, index]


def test_every_rpc_of_the_protocol_is_implemented():
    """No RPC is left to the generated class, which would answer UNIMPLEMENTED."""
    from weft.v2.server.servicer import V2Servicer
    from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceServicer as Generated

    methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    assert [] == [m.name for m in methods if getattr(V2Servicer, m.name) is getattr(Generated, m.name)]
