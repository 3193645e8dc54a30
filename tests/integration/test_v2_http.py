"""V2 over HTTP: ``tritonclient.http`` and plain requests before a gateway, with a model service alone behind it."""

import asyncio
import gzip
import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tests.integration.batching import running_service
from tests.integration.routing import running_router
from tests.integration.talking import GatewayProcess, running_gateway
from tests.processes import WAIT_S, scrape, wait_until
from tritonclient.http import aio
from tritonclient.utils import InferenceServerException

from weft.base.security.keys import new_key

MODELS = Path(__file__).parents[1] / "compat/models"
SERVED = ("simple", "simple_string", "simple_identity", "repeat_int32", "densenet_onnx")
ROW = np.arange(16, dtype=np.int32).reshape(1, 16)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    repository = tmp_path_factory.mktemp("models")
    for name in SERVED:
        shutil.copytree(MODELS / name, repository / name)
    config = repository / "densenet_onnx/config.pbtxt"
    config.write_text(config.read_text().replace("3, 224, 224", "3, 40, 40"))
    with (
        running_service(repository, "--load-model", "*", "--allow-client-shm") as service,
        running_gateway(service.grpc, "--max-body-bytes", "100000", "--max-json-bytes", "50000") as gateway,
    ):
        yield gateway


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(gateway.address, network_timeout=WAIT_S) as client:
        yield client


def inputs(is_binary: bool) -> list[triton.InferInput]:
    made = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for one in made:
        one.set_data_from_numpy(ROW, binary_data=is_binary)
    return made


def json_input(name: str, data: Any, datatype: str = "INT32", shape: tuple[int, ...] = (1, 16)) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


@pytest.mark.parametrize("is_binary", [True, False])
@pytest.mark.parametrize("is_binary_output", [True, False])
@pytest.mark.parametrize("encoding", [None, "gzip", "deflate"])
def test_tensors_are_json_or_binary(
    client: triton.InferenceServerClient, is_binary: bool, is_binary_output: bool, encoding: str | None
) -> None:
    """In either direction, compressed or not, and with an id and parameters."""
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=is_binary_output)]
    got = client.infer(
        "simple",
        inputs(is_binary),
        outputs=outputs,
        model_version="1",
        request_id="7",
        request_compression_algorithm=encoding,
        response_compression_algorithm=encoding,
        parameters={"a": "b"},
    )
    assert np.array_equal(2 * ROW, got.as_numpy("OUTPUT0"))
    assert got.as_numpy("OUTPUT1") is None
    assert ("simple", "7") == (got.get_response()["model_name"], got.get_response()["id"])


def test_strings_are_json_or_binary(client: triton.InferenceServerClient) -> None:
    """Bytes that are no text only in binary; in JSON they are an error that says so."""
    for value, is_binary in (("Grüße".encode(), False), (b"\xff\x00", True)):
        tensor = triton.InferInput("INPUT0", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[value]], np.object_), binary_data=is_binary)
        outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=is_binary)]
        got = client.infer("simple_identity", [tensor], outputs=outputs).as_numpy("OUTPUT0").ravel()[0]
        assert value == (got if is_binary else got.encode())
    with pytest.raises(InferenceServerException, match="not UTF-8"):
        client.infer("simple_identity", [tensor], outputs=[triton.InferRequestedOutput("OUTPUT0", binary_data=False)])


def test_classes_are_outputs(gateway: GatewayProcess) -> None:
    """As over gRPC, with labels; and an input may be compressed to less than the limit of a body."""
    pixels = np.zeros((3, 40, 40), np.float32)
    pixels[1] = 1
    body = {
        "inputs": [
            {
                "name": "data_0",
                "datatype": "FP32",
                "shape": [3, 40, 40],
                "parameters": {"binary_data_size": pixels.nbytes},
            }
        ],
        "outputs": [{"name": "fc6_1", "parameters": {"classification": 1}}],
    }
    head = json.dumps(body).encode()
    status, answer, _ = gateway.ask(
        "POST",
        "/v2/models/densenet_onnx/infer",
        gzip.compress(head + pixels.tobytes()),
        content_encoding="gzip",
        inference_header_content_length=str(len(head)),
    )
    assert (200, ["1.000000:1:green"]) == (status, answer["outputs"][0]["data"])


def test_facts_are_json(client: triton.InferenceServerClient) -> None:
    """Health, metadata, configuration, statistics, the repository, and settings."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple", "1")
    assert not client.is_model_ready("nothing")
    metadata = client.get_server_metadata()
    assert {"binary_tensor_data", "generate", "statistics"} <= set(metadata["extensions"])
    metadata = client.get_model_metadata("simple")
    assert {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 16]} == metadata["inputs"][0]
    assert (["1"], "simple") == (metadata["versions"], metadata["name"])
    config = client.get_model_config("simple", "1")
    assert (8, [16], "TYPE_INT32") == (
        config["max_batch_size"],
        config["input"][0]["dims"],
        config["input"][0]["data_type"],
    )
    client.infer("simple", inputs(is_binary=True))
    statistics = client.get_inference_statistics("simple")["model_stats"][0]
    assert statistics["inference_count"] >= 1
    assert statistics["inference_stats"]["success"]["ns"] > 0
    assert len(SERVED) == len(client.get_inference_statistics()["model_stats"])
    assert set(SERVED) == {entry["name"] for entry in client.get_model_repository_index()}
    assert ["TIMESTAMPS"] != client.get_trace_settings()["trace_level"]
    assert True is client.get_log_settings()["log_error"]


def test_models_are_unloaded_and_loaded(client: triton.InferenceServerClient) -> None:
    """With another configuration too; a model that is not there is an error."""
    config = client.get_model_config("simple_string")
    client.unload_model("simple_string")
    assert not client.is_model_ready("simple_string")
    client.load_model("simple_string", config=json.dumps(config | {"max_batch_size": 16}))
    assert 16 == client.get_model_config("simple_string")["max_batch_size"]
    client.load_model("simple_string")
    with pytest.raises(InferenceServerException):
        client.load_model("nothing")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("POST", "/v2/models/nothing/infer", {"inputs": []}, 404, "nothing"),
        ("GET", "/v2/models/nothing", None, 404, "nothing"),
        ("GET", "/v2/models/simple/versions/9/config", None, 404, "9"),
        ("GET", "/v2/nothing", None, 404, "GET /v2/nothing is not offered"),
        ("GET", "/v2/models/simple/infer", None, 405, "GET /v2/models/simple/infer is not offered"),
        ("POST", "/v2/models/simple/infer", b"{", 400, "the body is no JSON"),
        ("POST", "/v2/models/simple/infer", b"", 400, "the body is no JSON"),
        ("POST", "/v2/models/simple/infer", {"inputs": [json_input("INPUT0", [1])]}, 400, "INPUT"),
        ("POST", "/v2/models/simple/infer", b" " * 60_000, 413, "at most 50000"),
        ("POST", "/v2/models/simple/infer", b" " * 200_000, 413, "at most 100000"),
        ("POST", "/v2/models/simple/generate", {"INPUT0": [1]}, 400, "do not fit its shape"),
        ("POST", "/v2/models/repeat_int32/infer", {"inputs": []}, 501, "decoupled"),
        ("POST", "/v2/systemsharedmemory/region/r/register", {}, 400, "the body must have 'key'"),
        ("POST", "/v2/cudasharedmemory/region/r/register", {"raw_handle": 1}, 400, "the body must have 'raw_handle'"),
        ("POST", "/v2/logging", {"log_file": "x"}, 501, "log file location can not be updated"),
        ("POST", "/v2/repository/index", {"ready": 1}, 400, "'ready' must be true or false"),
    ],
)
def test_errors_have_status_and_message(
    gateway: GatewayProcess, method: str, path: str, body: Any, status: int, error: str
) -> None:
    """As of the gRPC status; the body is {"error": message}."""
    got, answer, _ = gateway.ask(method, path, body)
    assert (status, ["error"]) == (got, list(answer)), answer
    assert error in answer["error"]


def repeat(values: list[int], delay_ms: int) -> dict[str, Any]:
    return {"IN": values, "DELAY": [delay_ms] * len(values), "WAIT": [0]}


def test_generate_gives_one_object_or_events(gateway: GatewayProcess) -> None:
    """A model that answers several times streams; generate wants exactly one response."""
    text = {"INPUT0": "hi", "unknown": 1}
    status, answer, _ = gateway.ask("POST", "/v2/models/simple_identity/generate", text)
    assert (200, "hi", "simple_identity") == (status, answer["OUTPUT0"], answer["model_name"])
    status, answer, _ = gateway.ask("POST", "/v2/models/repeat_int32/versions/1/generate", repeat([5], 0))
    assert (200, 5) == (status, answer["OUT"])
    status, answer, _ = gateway.ask("POST", "/v2/models/repeat_int32/generate", repeat([5, 6], 0))
    assert (400, True) == (status, "use generate_stream" in answer["error"])
    connection = http.client.HTTPConnection(gateway.address, timeout=WAIT_S)
    connection.request("POST", "/v2/models/repeat_int32/generate_stream", json.dumps(repeat([7, 8], 0)))
    response = connection.getresponse()
    events = [json.loads(line[6:]) for line in response.read().split(b"\n\n") if line]
    connection.close()
    assert [(7, 0), (8, 1)] == [(event["OUT"], event["IDX"]) for event in events]
    assert "text/event-stream; charset=utf-8" == response.headers["content-type"]
    assert 404 == gateway.ask("POST", "/v2/models/nothing/generate_stream", {})[0]


def test_a_client_that_leaves_cancels_its_stream(gateway: GatewayProcess) -> None:
    """The gateway counts it, and serves on."""
    connection = http.client.HTTPConnection(gateway.address, timeout=WAIT_S)
    connection.request("POST", "/v2/models/repeat_int32/generate_stream", json.dumps(repeat([1] * 9, 200)))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    connection.sock.close()
    response.close()
    assert 200 == gateway.ask("GET", "/v2/health/ready")[0]
    name = 'weft_gateway_disconnects_total{endpoint="/v2/generate_stream"}'
    wait_until(lambda: scrape(gateway.metrics).get(name, 0) >= 1, name)


async def test_the_asynchronous_client_works(gateway: GatewayProcess) -> None:
    """Of aiohttp; many requests at once."""
    async with aio.InferenceServerClient(gateway.address) as client:
        results = await asyncio.gather(*(client.infer("simple", inputs(is_binary=True)) for _ in range(8)))
    assert all(np.array_equal(2 * ROW, result.as_numpy("OUTPUT0")) for result in results)


def test_models_are_unloaded_and_loaded_through_a_router(tmp_path: Path) -> None:
    """Where they are; the router's own mode is for its graphs, and what nothing knows is an error."""
    (tmp_path / "graphs").mkdir()
    shutil.copytree(MODELS / "simple", tmp_path / "models/simple")
    with (
        running_service(tmp_path / "models", "--load-model", "*") as service,
        running_router(tmp_path / "graphs", service.grpc, ("--model-control-mode", "explicit")) as router,
        running_gateway(router.grpc) as gateway,
        triton.InferenceServerClient(gateway.address, network_timeout=WAIT_S) as client,
    ):
        client.unload_model("simple")
        assert not client.is_model_ready("simple")
        client.load_model("simple")
        assert client.is_model_ready("simple")
        assert np.array_equal(2 * ROW, client.infer("simple", inputs(is_binary=True)).as_numpy("OUTPUT0"))
        with pytest.raises(InferenceServerException, match="failed to load 'nothing', failed to poll"):
            client.load_model("nothing")


def test_keys_are_those_of_the_service(tmp_path: Path) -> None:
    """Probes need none; everything else does, and control its right."""
    shutil.copytree(MODELS / "simple", tmp_path / "models/simple")
    key, line = new_key("ada")
    (tmp_path / "keys").write_text(line)
    options = ("--load-model", "*", "--auth-keys", str(tmp_path / "keys"))
    with (
        running_service(tmp_path / "models", *options) as service,
        running_gateway(service.grpc) as gateway,
    ):
        assert 200 == gateway.ask("GET", "/v2/health/ready")[0]
        assert 401 == gateway.ask("GET", "/v2/models/simple")[0]
        assert 401 == gateway.ask("POST", "/v2/models/simple/infer", {})[0]
        with triton.InferenceServerClient(gateway.address) as client:
            headers = {"authorization": f"Bearer {key}"}
            got = client.infer("simple", inputs(is_binary=True), headers=headers).as_numpy("OUTPUT0")
            assert np.array_equal(2 * ROW, got)
            with pytest.raises(InferenceServerException, match="does not allow RepositoryModelUnload") as caught:
                client.unload_model("simple", headers=headers)
            assert "403" == caught.value.status()
