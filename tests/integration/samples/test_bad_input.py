"""Bad input on every RPC: the right status, a text that says what to do, and a service that goes on."""

import io
import struct
import zlib
from collections.abc import Mapping

import grpc
import numpy as np
import pytest
from PIL import Image

from weft.base.processes.process import Endpoint
from weft.base.tensors import encode_bytes
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

FLOATS = np.ones((1, 16), dtype=np.float32).tobytes()


def request(
    model: str = "identity",
    *,
    name: str = "INPUT0",
    datatype: str = "FP32",
    shape: tuple[int, ...] = (1, 16),
    raw: bytes | None = FLOATS,
    version: str = "",
) -> pb.ModelInferRequest:
    """A request for `identity`, right unless told otherwise."""
    message = pb.ModelInferRequest(model_name=model, model_version=version, id="7")
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    if raw is not None:
        message.raw_input_contents.append(raw)
    return message


def png_bomb(num_bytes: int) -> bytes:
    """A valid PNG header that promises a 100-megapixel image, with `num_bytes` of compressed zeros behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 10_000, 10_000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(num_bytes)))
        + chunk(b"IEND", b"")
    )


def image(data: bytes) -> pb.ModelInferRequest:
    """A request for `digits`."""
    return request("digits", name="IMAGE", datatype="BYTES", shape=(1, 1), raw=encode_bytes([data]))


def text(raw: bytes, shape: tuple[int, ...] = (1, 1)) -> pb.ModelInferRequest:
    """A request for `embed` with these raw bytes."""
    return request("embed", name="TEXT", datatype="BYTES", shape=shape, raw=raw)


TWICE = request()
TWICE.inputs.add(name="INPUT0", datatype="FP32", shape=(1, 16))
TWICE.raw_input_contents.append(FLOATS)

WRONG_OUTPUT = request()
WRONG_OUTPUT.outputs.add(name="NOPE")

BAD_PRIORITY = request()
BAD_PRIORITY.parameters["priority"].string_param = "high"

PRIORITY_BELOW_0 = request()
PRIORITY_BELOW_0.parameters["priority"].int64_param = -1

CASES = {
    "unknown model": (request("nope"), "NOT_FOUND", "unknown model"),
    "empty model name": (request(""), "NOT_FOUND", "unknown model"),
    "path as model name": (request("../../etc/passwd"), "NOT_FOUND", "unknown model"),
    "unknown version": (request(version="99"), "NOT_FOUND", "99"),
    "version is no number": (request(version="latest"), "INVALID_ARGUMENT", "version"),
    "wrong datatype": (request(datatype="INT32"), "INVALID_ARGUMENT", "expects 'FP32'"),
    "no such datatype": (request(datatype="FLOAT"), "INVALID_ARGUMENT", "expects 'FP32'"),
    "wrong shape": (request(shape=(1, 15)), "INVALID_ARGUMENT", "unexpected shape for input 'INPUT0'"),
    "no batch dimension": (request(shape=(16,)), "INVALID_ARGUMENT", "unexpected shape"),
    "negative shape": (request(shape=(-1, 16)), "INVALID_ARGUMENT", "unexpected shape"),
    "byte size": (request(raw=b"1234"), "INVALID_ARGUMENT", "Expected 64, got 4"),
    "no data": (request(raw=None), "INVALID_ARGUMENT", "unable to find data"),
    "unknown input": (request(name="INPUT"), "INVALID_ARGUMENT", "unexpected inference input 'INPUT'"),
    "missing input": (pb.ModelInferRequest(model_name="identity"), "INVALID_ARGUMENT", "missing required input(s)"),
    "input given twice": (TWICE, "INVALID_ARGUMENT", "twice"),
    "unknown output": (WRONG_OUTPUT, "INVALID_ARGUMENT", "unexpected inference output 'NOPE'"),
    "batch too large": (
        request(shape=(65, 16), raw=FLOATS * 65),
        "INVALID_ARGUMENT",
        "inference request batch-size must be <= 64",
    ),
    "batch too large for a graph": (
        request("identity3", shape=(65, 16), raw=FLOATS * 65),
        "INVALID_ARGUMENT",
        "inference request batch-size must be <= 64",
    ),
    "priority is no number": (BAD_PRIORITY, "INVALID_ARGUMENT", "priority"),
    "priority is below 0": (PRIORITY_BELOW_0, "INVALID_ARGUMENT", "at least 0, got -1"),
    "truncated BYTES length": (text(b"\x01\x00"), "INVALID_ARGUMENT", "incomplete string"),
    "truncated BYTES data": (text(struct.pack("<I", 100) + b"abc"), "INVALID_ARGUMENT", "incomplete string"),
    "too few BYTES elements": (text(encode_bytes([b"one"]), (2, 1)), "INVALID_ARGUMENT", "string elements"),
    "text is not UTF-8": (text(encode_bytes([b"\xff\xfe\xfa"])), "INVALID_ARGUMENT", "UTF-8"),
    "not an image": (image(b"this is no image"), "INVALID_ARGUMENT", "image"),
    "empty image": (image(b""), "INVALID_ARGUMENT", "image"),
    "truncated image": (image(png_bomb(100)[:40]), "INVALID_ARGUMENT", "image"),
    "image bomb": (lambda: image(png_bomb(100_000_000)), "INVALID_ARGUMENT", "pixels"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_request_gets_its_status_and_text(stub: GRPCInferenceServiceStub, case: str) -> None:
    """The status is that of the error table, the text names the fault, and the next good request is answered."""
    message, status, expected = CASES[case]
    if callable(message):
        message = message()
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message, timeout=20)
    assert caught.value.code().name == status, caught.value.details()
    assert expected in caught.value.details()
    answer = stub.ModelInfer(request(), timeout=20)
    assert answer.raw_output_contents[0] == FLOATS
    assert answer.id == "7"


def test_an_error_inside_a_graph_names_graph_step_and_model(stub: GRPCInferenceServiceStub) -> None:
    """Whoever reads the message knows where it broke; the trailer has the path so far."""
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(image(b"no image"), timeout=20)
    details = caught.value.details()
    assert "digits/1" in details
    assert "root/" in details
    assert "decode_digit" in details
    assert "x-graph-path" in dict(caught.value.trailing_metadata())


@pytest.mark.parametrize("service", ["router", "preprocess", "model", "postprocess"])
@pytest.mark.parametrize(
    ("rpc", "message"),
    [
        ("ModelMetadata", pb.ModelMetadataRequest(name="nope")),
        ("ModelConfig", pb.ModelConfigRequest(name="nope")),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="nope")),
        ("ModelInfer", pb.ModelInferRequest(model_name="nope")),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="nope")),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="nope")),
        ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="r", key="/r", byte_size=1)),
        ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="r", byte_size=1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_rpc_refuses_what_it_cannot_do(
    mesh: Mapping[str, Endpoint], service: str, rpc: str, message: object
) -> None:
    """An unknown model is NOT_FOUND, a closed control UNAVAILABLE, what is not offered UNIMPLEMENTED."""
    expected = {
        "RepositoryModelLoad": "UNAVAILABLE",
        "RepositoryModelUnload": "UNAVAILABLE",
        "SystemSharedMemoryRegister": "UNIMPLEMENTED",
        "CudaSharedMemoryRegister": "UNIMPLEMENTED",
    }.get(rpc, "NOT_FOUND")
    with grpc.insecure_channel(mesh[service].grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        getattr(GRPCInferenceServiceStub(channel), rpc)(message, timeout=20)
    assert caught.value.code().name == expected, caught.value.details()
    assert caught.value.details()


def test_good_requests_among_bad_ones_are_answered(stub: GRPCInferenceServiceStub) -> None:
    """Of requests that are in work at once, the bad images are refused and the good ones answered."""
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "PNG")
    calls = [
        stub.ModelInfer.future(image(buffer.getvalue() if number % 2 else b"not an image"), timeout=20)
        for number in range(20)
    ]
    codes = [call.code().name for call in calls]
    assert codes == ["INVALID_ARGUMENT", "OK"] * 10
