"""V2 over HTTP: bodies of requests and responses, and the generate extension."""

import asyncio
import contextlib
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.core import InferCall, InferResult
from weft.base.errors import InvalidArgumentError, ResourceExhaustedError
from weft.base.tensors import DATATYPE_BY_NUMPY, WireTensor, bytes_tensor, encode
from weft.gateway.errors import RequestError
from weft.gateway.http.request_context import RequestTracker
from weft.gateway.http.resources import Limits, Resources, accepted_encoding, compressed, decompressed
from weft.gateway.main import Gateway
from weft.gateway.openai.endpoint import Models
from weft.gateway.v2 import routes as messages
from weft.gateway.v2.inference import make_body
from weft.gateway.v2.request import bytes_of, cut, generate_request, generate_response, json_of, parse_head, raw_request
from weft_protos import grpc_service_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig

NUMBERS = [datatype for datatype in DATATYPE_BY_NUMPY.values() if datatype != "BYTES"]


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_go_through_json_and_back(datatype: str) -> None:
    """Of every datatype, nested or flat; the smallest and largest integers too."""
    array = np.array([[0, 1], [1, 0]]).astype({name: dtype for dtype, name in DATATYPE_BY_NUMPY.items()}[datatype])
    if "INT" in datatype:
        array[0] = np.iinfo(array.dtype).min, np.iinfo(array.dtype).max
    tensor = encode(array)
    flat = json.loads(json_of(tensor, "x"))
    assert tensor.data == bytes_of(flat, datatype, "x")
    assert tensor.data == bytes_of([flat[:2], flat[2:]], datatype, "x")


def test_strings_go_through_json_and_back() -> None:
    """As UTF-8; bytes that are none are refused with the way to get them."""
    tensor = bytes_tensor(["a", "", "Grüße"], (3,))
    assert ["a", "", "Grüße"] == json.loads(json_of(tensor, "x"))
    assert tensor.data == bytes_of([["a"], ["", "Grüße"]], "BYTES", "x")
    with pytest.raises(InvalidArgumentError, match='"binary_data": true'):
        json_of(bytes_tensor([b"\xff"], (1,)), "x")


def test_a_request_has_everything_that_json_says() -> None:
    """Parameters at each place, outputs, and what is wanted in binary."""
    head = parse_head(Path(__file__).with_name("infer.json").read_bytes(), "m", "3")
    request = head.request([memoryview(b"\0\0"), memoryview(b"\x80\x3f")])
    assert ("m", "3", "7") == (request.model_name, request.model_version, request.request_id)
    assert {"sequence_id", "priority", "s", "f", "b"} == set(request.parameters)
    assert [np.array([1, 2], np.int32).tobytes(), b"\0\0\x80\x3f"] == request.contents
    assert {"shared_memory_region": "r"} == request.tensors[2].parameters
    assert {"classification": 3} == request.outputs[0].parameters
    assert (False, True, True) == (head.is_binary("X"), head.is_binary("Y"), head.is_binary("Z"))
    with pytest.raises(RequestError, match=r"has 3 bytes behind its JSON, and .* are 4 in all"):
        head.request([memoryview(b"123")])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "datatype", "shape", "data", "parameters", "binary_data"]), inner)
    ),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["inputs", "outputs", "parameters", "id"]), JSON | st.lists(JSON)))
def test_any_json_is_a_request_or_refused(body: dict[str, Any]) -> None:
    """Nothing else is raised, by either extension."""
    for read in (
        lambda data: parse_head(data, "m", "").request([]),
        lambda data: generate_request(data, model(("id", "INT32", [-1])).SerializeToString(), ""),
    ):
        with contextlib.suppress(InvalidArgumentError):
            read(json.dumps(body).encode())


def test_binary_data_is_cut_wherever_its_parts_end() -> None:
    """Each piece has its bytes, in order; empty ones too."""
    data = bytes(range(10))
    for size in range(1, 11):
        parts = [memoryview(data[begin : begin + size]) for begin in range(0, 10, size)]
        assert [b"", data[:3], data[3:9], b"", data[9:]] == cut(parts, [0, 3, 6, 0, 1])


async def run_here(_is_large: bool, work: Any, *args: Any) -> Any:
    return work(*args)


async def test_a_response_has_json_and_binary_outputs() -> None:
    """The size of each binary one is in its parameters; one in shared memory has no data."""
    outputs = {
        "A": encode(np.array([1, 2], np.int32)),
        "B": encode(np.array([0.5], np.float32)),
        "C": WireTensor("FP32", (1,), b""),
    }
    result = InferResult("m", "1", "7", {"p": 1}, outputs)
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    text, tensor = await make_body(result, {"C": region}, lambda name: name == "B", run_here)
    assert 4 == len(tensor)
    assert {
        "model_name": "m",
        "model_version": "1",
        "id": "7",
        "parameters": {"p": 1},
        "outputs": [
            {"name": "A", "datatype": "INT32", "shape": [2], "data": [1, 2]},
            {"name": "B", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
            {"name": "C", "datatype": "FP32", "shape": [1], "parameters": region},
        ],
    } == json.loads(text)
    assert 1 == len(await make_body(InferResult("m", "1", ""), {}, bool, run_here))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_bodies_are_read_and_written(encoding: str) -> None:
    """In parts of any size; cut off, too large or garbage they are refused."""
    data, sizes = bytes(100_000), list[int]()
    sent = b"".join(await compressed([data[:7], data[7:]], encoding))
    assert data == (gzip if encoding == "gzip" else zlib).decompress(sent)
    parts = [sent[index : index + 10] for index in range(0, len(sent), 10)]
    assert data == b"".join(await decompressed(parts, encoding, len(data), sizes.append))
    assert [len(data)] == sizes
    for wrong, message in ((sent[:-1], "is cut off"), (sent + b"x", "goes on"), (b"garbage", "is not of its")):
        with pytest.raises(RequestError, match=message):
            await decompressed([wrong], encoding, len(data), sizes.append)
    with pytest.raises(RequestError, match="more than 99999 bytes when decompressed") as caught:
        await decompressed([sent], encoding, len(data) - 1, sizes.append)
    assert 413 == caught.value.http_status
    with pytest.raises(RequestError, match="content-encoding 'br' is not taken"):
        await decompressed([sent], "br", 1, sizes.append)


async def test_what_a_bomb_becomes_is_counted_as_it_is_made() -> None:
    """Each megabyte before the next is made, so that many at once take no more memory than the bytes in work."""
    made: list[int] = []

    def count(num_bytes: int) -> None:
        made.append(num_bytes)
        if sum(made) > 4 << 20:
            raise ResourceExhaustedError("enough")

    with pytest.raises(ResourceExhaustedError):
        await decompressed([gzip.compress(bytes(64 << 20))], "gzip", 64 << 20, count)
    assert 4 << 20 < sum(made) <= 6 << 20


def test_brackets_count_no_elements() -> None:
    """As many as JSON may have."""
    metadata = model(("T", "BYTES", [-1])).SerializeToString()
    body = '{"T": ' + "[" * 700 + '"a"' + "]" * 700 + "}"
    assert (1,) == generate_request(body.encode(), metadata, "").inputs["T"].shape


def test_the_encoding_of_a_response_is_one_that_the_client_takes() -> None:
    """The first that is known."""
    wanted = {"gzip": "gzip", "br, deflate;q=0.5": "deflate", "gzip;q=0, deflate": "deflate", "br": "", "": ""}
    assert wanted == {header: accepted_encoding(header) for header in wanted}


async def test_a_client_that_leaves_cancels_its_call() -> None:
    """And the call has ended when the request has."""
    called, has_ended = asyncio.Event(), asyncio.Event()

    class Router:
        async def call(self, method: str, request: Any, **_: Any) -> None:
            assert method == "ServerMetadata"

        async def infer_message(self, request: Any, **_: Any) -> None:
            called.set()
            try:
                await asyncio.Event().wait()
            finally:
                has_ended.set()

    resources = Resources(Router(), Limits(1000, 1000, 1000, 1.0))  # type: ignore[arg-type]
    gateway = Gateway(resources, Models(Router(), {}))  # type: ignore[arg-type]
    app = RequestTracker(gateway.app(), gateway.endpoint_of, ())
    events = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if events:
            return events.pop()
        await called.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message.get("status", 499) == 499

    scope = {"type": "http", "method": "POST", "path": "/v2/models/m/infer", "headers": [], "query_string": b""}
    async with asyncio.timeout(60):
        await app(scope, receive, send)
    assert has_ended.is_set()
    assert 0 == resources.in_work.num_bytes


def model(*inputs: tuple[str, str, list[int]]) -> pb.ModelMetadataResponse:
    metadata = pb.ModelMetadataResponse(name="m")
    for name, datatype, shape in inputs:
        metadata.inputs.add(name=name, datatype=datatype, shape=shape)
    return metadata


def test_generate_maps_fields_to_inputs_and_parameters() -> None:
    """By name, at the top and within "parameters"; shapes follow from what is given."""
    metadata = model(("text_input", "BYTES", [-1, 1]), ("stream", "BOOL", [1]), ("ids", "INT32", [-1]))
    body = {
        "id": "7",
        "text_input": "hi",
        "ids": [1, 2, 3],
        "top": 1,
        "parameters": {"stream": True, "temperature": 0.5},
    }
    call = generate_request(json.dumps(body).encode(), metadata.SerializeToString(), "2")
    inputs = {
        "text_input": WireTensor("BYTES", (1, 1), b"\2\0\0\0hi"),
        "ids": encode(np.array([1, 2, 3], np.int32)),
        "stream": WireTensor("BOOL", (1,), b"\1"),
    }
    assert InferCall("m", "2", "7", {"top": 1, "temperature": 0.5}, inputs) == call


def test_a_generated_response_is_flat() -> None:
    """One element is a value, several are an array."""
    outputs = {"text": bytes_tensor(["hi"], (1, 1)), "n": encode(np.array([1, 2], np.int32))}
    assert {"model_name": "m", "model_version": "1", "end": True, "text": "hi", "n": [1, 2]} == generate_response(
        InferResult("m", "1", "", {"end": True}, outputs)
    )


def test_a_body_without_json_is_the_only_input() -> None:
    """Numbers fill its open dimension; bytes are one string."""
    call = raw_request(model(("A", "INT32", [-1, 3])), "", [bytes(8), bytes(4)])
    assert {"A": WireTensor("INT32", (1, 3), bytes(12))} == call.inputs
    call = raw_request(model(("A", "BYTES", [1])), "", [b"hello"])
    assert {"A": WireTensor("BYTES", (1,), b"\5\0\0\0hello")} == call.inputs
    with pytest.raises(RequestError, match="no whole elements of INT32"):
        raw_request(model(("A", "INT32", [-1])), "", [bytes(5)])
    with pytest.raises(RequestError, match="got 2 inputs in 'm' model configuration; send JSON"):
        raw_request(model(("A", "INT32", [1]), ("B", "INT32", [1])), "", [bytes(4)])


def test_messages_are_written_as_triton_writes_them() -> None:
    """As protobuf's own writer, but 64-bit integers are numbers."""
    config = ModelConfig(name="m", max_batch_size=4)
    config.input.add(name="A", data_type="TYPE_FP32", dims=[1, -1])
    config.dynamic_batching.max_queue_delay_microseconds = 5
    config.parameters["k"].string_value = "v"
    expected = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    written = messages.to_json(config)
    assert [1, -1] == written["input"][0]["dims"]
    assert 5 == written["dynamic_batching"]["max_queue_delay_microseconds"]
    assert json.loads(json.dumps(expected)) == json_format.MessageToDict(
        json_format.ParseDict(written, ModelConfig()),
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )


def test_settings_and_loads_become_messages() -> None:
    """Files of a load are base64; a level of traces is a list, other settings are not."""
    load = messages.load_request("m", {"parameters": {"config": "{}", "file:1/model.onnx": "AAE="}})
    assert ("{}", b"\0\1") == (
        load.parameters["config"].string_param,
        load.parameters["file:1/model.onnx"].bytes_param,
    )
    with pytest.raises(RequestError, match="'parameters' must be an object"):
        messages.unload_request("m", {"parameters": [1]})
    trace = messages.trace_request("", {"trace_level": ["TIMESTAMPS"], "trace_rate": 5, "trace_file": None})
    assert (["TIMESTAMPS"], ["5"], []) == tuple(
        list(trace.settings[name].value) for name in ("trace_level", "trace_rate", "trace_file")
    )
    answer = pb.TraceSettingResponse()
    for name, setting in trace.settings.items():
        answer.settings[name].value.extend(setting.value)
    assert {"trace_level": ["TIMESTAMPS"], "trace_rate": "5", "trace_file": ""} == messages.trace_json(answer)
    log = messages.log_request("", {"log_info": True, "log_verbose_level": 1, "log_file": "x"})
    assert (True, 1, "x") == (
        log.settings["log_info"].bool_param,
        log.settings["log_verbose_level"].uint32_param,
        log.settings["log_file"].string_param,
    )
    with pytest.raises(RequestError, match="'log_info' must be"):
        messages.log_request("", {"log_info": -1})


async def test_paths_have_few_names() -> None:
    """For metrics and spans, whatever the models are called."""
    router: Any = None
    gateway = Gateway(Resources(router, Limits(1000, 1000, 1000, 1.0)), Models(router, {}))
    assert ["/v2/infer", "/v2/generate_stream", "/v2", "/v2", "/other", "/v1/models", "/v1/completions"] == [
        gateway.endpoint_of(path)
        for path in (
            "/v2/models/a/infer",
            "/v2/models/a/versions/1/generate_stream",
            "/v2",
            "/v2/x",
            "/v22",
            "/v1/models",
            "/v1/completions",
        )
    ]
