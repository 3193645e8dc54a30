"""Tensors in shared memory, between tritonclient and a real server."""

import asyncio
import errno
import os
import uuid

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tests.unit.v2.builders import refused
from tritonclient.grpc import aio

from weft.base.errors import ResourceExhaustedError
from weft.base.processes.malloc import available_bytes
from weft.v2.protocol import shared_memory
from weft.v2.protocol.shared_memory import MAX_REGIONS, SharedMemory, SystemRegion

X = np.arange(8, dtype=np.int32).reshape(2, 4)


@pytest.fixture
def memory():
    """What the server knows."""
    return SharedMemory()


@pytest.fixture
def make_object():
    """Makes shared memory objects of some bytes; gives their key."""
    handles = []

    def make(num_bytes):
        key = f"/weft-test-{uuid.uuid4().hex}"
        handles.append(shm.create_shared_memory_region(key, key, num_bytes, create_only=True))
        return key, handles[-1]

    yield make
    for handle in handles:
        shm.destroy_shared_memory_region(handle)


def input_at(region, num_bytes, offset=0, shape=X.shape, datatype="INT32"):
    """An input ``x`` that lies in a region."""
    tensor = aio.InferInput("x", list(shape), datatype)
    tensor.set_shared_memory(region, num_bytes, offset)
    return tensor


def output_at(region, num_bytes, offset=0):
    """The output ``x``, to be written to a region."""
    output = aio.InferRequestedOutput("x")
    output.set_shared_memory(region, num_bytes, offset)
    return output


async def test_a_request_and_its_answer_in_shared_memory(client, core, make_object):
    """Input and output lie in one region at offsets; the message carries neither."""
    key, handle = make_object(4096)
    shm.set_shared_memory_region(handle, [X], offset=64)
    await client.register_system_shared_memory("r", key, 4000, offset=32)
    result = await client.infer("echo", [input_at("r", X.nbytes, 32)], outputs=[output_at("r", 100, 1000)])
    answer = result.get_output("x")
    told = {name: parameter.WhichOneof("parameter_choice") for name, parameter in answer.parameters.items()}
    assert [b""] == list(result.get_response().raw_output_contents)
    assert "string_param" == told["shared_memory_region"]
    assert (32, 1000) == (
        answer.parameters["shared_memory_byte_size"].int64_param,
        answer.parameters["shared_memory_offset"].int64_param,
    )
    assert X.tolist() == shm.get_contents_as_numpy(handle, np.int32, [2, 4], offset=1032).tolist()
    assert X.tobytes() == core.calls[-1][0].inputs["x"].data


async def test_tensors_in_the_message_beside_those_in_memory(client, core, make_object):
    """Raw contents are counted without the inputs that lie in shared memory, wherever these stand."""
    key, handle = make_object(64)
    shm.set_shared_memory_region(handle, [X])
    await client.register_system_shared_memory("r", key, 64)
    other = aio.InferInput("s", [2, 1], "BYTES").set_data_from_numpy(np.array([[b"a"], [b"b"]], object))
    await client.infer("echo", [input_at("r", X.nbytes), other])
    call = core.calls[-1][0]
    assert (X.tobytes(), b"\x01\0\0\0a\x01\0\0\0b") == (call.inputs["x"].data, call.inputs["s"].data)


async def test_a_stream_uses_shared_memory(client, make_object):
    """Answers of a stream are written where the request wants them."""
    key, handle = make_object(64)
    shm.set_shared_memory_region(handle, [X])
    await client.register_system_shared_memory("r", key, 64)

    async def requests():
        yield {"model_name": "echo", "inputs": [input_at("r", 32)], "outputs": [output_at("r", 32, 32)]}

    async for result, error in client.stream_infer(requests()):
        assert (None, [b""]) == (error, list(result.get_response().raw_output_contents))
        break
    assert X.tolist() == shm.get_contents_as_numpy(handle, np.int32, [2, 4], offset=32).tolist()


async def test_status_and_unregister(client, make_object):
    """Regions are listed as registered, one or all, until they are unregistered."""
    key, _ = make_object(128)
    await client.register_system_shared_memory("a", key, 64, offset=8)
    await client.register_system_shared_memory("b", key, 128)
    one = await client.get_system_shared_memory_status("a", as_json=True)
    assert {"regions": {"a": {"name": "a", "key": key, "offset": "8", "byte_size": "64"}}} == one
    await client.unregister_system_shared_memory("a")
    await client.unregister_system_shared_memory("a")
    assert ["b"] == list((await client.get_system_shared_memory_status()).regions)
    await client.unregister_system_shared_memory()
    assert [] == list((await client.get_system_shared_memory_status()).regions)
    assert ("NOT_FOUND", "Unable to find shared memory region: 'b'; registered: none") == await refused(
        client.get_system_shared_memory_status("b")
    )


async def test_the_server_says_what_it_offers(client):
    """The extension is named where it is on."""
    assert "system_shared_memory" in (await client.get_server_metadata()).extensions


@pytest.mark.parametrize(
    ("name", "key", "num_bytes", "offset", "status", "text"),
    [
        ("a", None, 64, 0, "ALREADY_EXISTS", "shared memory region 'a' already in manager"),
        ("", None, 64, 0, "INVALID_ARGUMENT", "needs a name"),
        ("b", None, 65, 0, "INVALID_ARGUMENT", "Invalid offset + byte size for shared memory region: 'b': 0 + 65"),
        ("b", None, 1, 64, "INVALID_ARGUMENT", "Invalid offset + byte size"),
        ("b", None, 2**63, 2**63, "INVALID_ARGUMENT", "Invalid offset + byte size"),
        ("b", None, 0, 0, "INVALID_ARGUMENT", "a region at least 1"),
        ("b" * 1025, None, 1, 0, "INVALID_ARGUMENT", "region has 1025 characters; at most 1024 are allowed"),
        ("b\n", None, 1, 0, "INVALID_ARGUMENT", "characters that cannot be shown: 'b\\n'"),
        ("b", "/k\x1b[31m", 1, 0, "INVALID_ARGUMENT", "characters that cannot be shown"),
        ("b", "k" * 1_000_000, 1, 0, "INVALID_ARGUMENT", "key has 1000000 characters"),
        ("b", "/weft-no-such", 1, 0, "INVALID_ARGUMENT", "No such file or directory"),
        ("b", "/../etc/passwd", 1, 0, "INVALID_ARGUMENT", "is no name of shm_open"),
        ("b", "..", 1, 0, "INVALID_ARGUMENT", "is no name of shm_open"),
        ("b", "", 1, 0, "INVALID_ARGUMENT", "is no name of shm_open"),
        ("b", "/", 1, 0, "INVALID_ARGUMENT", "is no name of shm_open"),
    ],
)
async def test_bad_regions(client, make_object, name, key, num_bytes, offset, status, text):
    """A region that cannot be is refused with the reason."""
    known, _ = make_object(64)
    await client.register_system_shared_memory("a", known, 64)
    got = await refused(client.register_system_shared_memory(name, known if key is None else key, num_bytes, offset))
    assert (status, text) == (got[0], text if text in got[1] else got[1])


@pytest.mark.parametrize(
    ("tensor", "status", "text"),
    [
        (input_at("no", 32), "NOT_FOUND", "Unable to find shared memory region: 'no'; registered: 'r'"),
        (input_at("r", 65), "INVALID_ARGUMENT", "0 + 65 bytes of tensor 'x'; the region has 64"),
        (input_at("r", 32, 33), "INVALID_ARGUMENT", "Invalid offset + byte size for shared memory region: 'r'"),
        (input_at("r", 2**62, 2**62), "INVALID_ARGUMENT", "Invalid offset + byte size"),
        (input_at("r", -1), "INVALID_ARGUMENT", "'shared_memory_byte_size' of tensor 'x' must be an integer"),
        (input_at("r", 32, -1), "INVALID_ARGUMENT", "'shared_memory_offset' of tensor 'x' must be an integer"),
    ],
)
async def test_bad_places(client, make_object, tensor, status, text):
    """An input outside its region, or in none, is refused before anything runs."""
    key, _ = make_object(64)
    await client.register_system_shared_memory("r", key, 64)
    got = await refused(client.infer("echo", [tensor]))
    assert (status, text) == (got[0], text if text in got[1] else got[1])


@pytest.mark.parametrize(
    ("num_bytes", "shape", "datatype", "text"),
    [
        (8 << 40, [16], "FP32", "Expected 64, got 8796093022208"),
        (60, [16], "FP32", "Expected 64, got 60"),
        (8 << 40, [2, 1], "BYTES", "Expected 8 to 536870920, got 8796093022208"),
        (7, [2, 1], "BYTES", "Expected 8 to 536870920, got 7"),
        (8, [-1, -2], "FP32", "sizes are at least 0"),
        (8, [1] * 65, "FP32", "has 65 dimensions; at most 64"),
        (8, [2**31, 2**31], "BYTES", "at most 4194304 are allowed"),
        (8 << 40, [1], "FP128", "is no V2 datatype"),
    ],
)
async def test_a_size_that_the_shape_cannot_have_is_not_read(
    client, make_object, monkeypatch, num_bytes, shape, datatype, text
):
    """The stated size is compared with the shape before a byte is read, of however large a region."""
    key, _ = make_object(64)
    os.truncate(f"/dev/shm{key}", 8 << 40)
    await client.register_system_shared_memory("r", key, 8 << 40)
    monkeypatch.setattr(SystemRegion, "read", lambda *_: pytest.fail("it was read"))
    got = await refused(client.infer("echo", [input_at("r", num_bytes, shape=shape, datatype=datatype)]))
    assert ("INVALID_ARGUMENT", text) == (got[0], text if text in got[1] else got[1])


async def test_a_tensor_that_would_not_leave_memory_is_not_read(client, make_object, monkeypatch):
    """Eight terabytes that nobody has written, with the shape for them, are refused with what is available."""
    key, _ = make_object(64)
    os.truncate(f"/dev/shm{key}", 8 << 40)
    await client.register_system_shared_memory("r", key, 8 << 40)
    monkeypatch.setattr(SystemRegion, "read", lambda *_: pytest.fail("it was read"))
    got = await refused(client.infer("echo", [input_at("r", 8 << 40, shape=[1, 2 << 40])]))
    assert "RESOURCE_EXHAUSTED" == got[0]
    assert "8796093022208 bytes in shared memory region 'r' cannot be copied" in got[1]


async def test_a_tensor_larger_than_one_read_of_the_kernel(client, core, make_object, monkeypatch):
    """What takes several reads, as above 2 GiB, arrives whole; so does the reason when the object has shrunk."""
    monkeypatch.setattr(shared_memory, "MAX_PREAD_BYTES", 16)
    key, handle = make_object(4096)
    shm.set_shared_memory_region(handle, [X], offset=8)
    await client.register_system_shared_memory("r", key, 4088, offset=4)
    await client.infer("echo", [input_at("r", X.nbytes, 4)])
    assert X.tobytes() == core.calls[-1][0].inputs["x"].data
    os.truncate(f"/dev/shm{key}", 16)
    status, text = await refused(client.infer("echo", [input_at("r", X.nbytes, 4)]))
    assert ("INVALID_ARGUMENT", True) == (status, "has shrunk: 8 of 32 bytes" in text)


async def test_an_answer_that_finds_no_room_in_shared_memory(client, make_object, monkeypatch):
    """A full /dev/shm is RESOURCE_EXHAUSTED with the cure, not an internal error."""

    def is_full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    key, _ = make_object(4096)
    await client.register_system_shared_memory("r", key, 4096)
    monkeypatch.setattr(os, "pwrite", is_full)
    got = await refused(client.infer("echo", [input_at("r", 32)], outputs=[output_at("r", 32, 32)]))
    assert "RESOURCE_EXHAUSTED" == got[0]
    assert "No space left on device; give /dev/shm more room" in got[1]


def test_memory_that_is_available_is_the_least_that_is_known(tmp_path):
    """The kernel's estimate, or what is left of the container's limit if that is less."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert 2 << 20 == available_bytes(tmp_path / "meminfo", tmp_path)
    (tmp_path / "memory.current").write_text("100\n")
    for limit, expected in (("max", 2 << 20), ("1100", 1000), ("50", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert expected == available_bytes(tmp_path / "meminfo", tmp_path)
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


async def test_an_output_that_does_not_fit(client, make_object):
    """A place that is too small for the answer is INVALID_ARGUMENT with both sizes, and nothing is written."""
    key, handle = make_object(64)
    shm.set_shared_memory_region(handle, [X])
    await client.register_system_shared_memory("r", key, 64)
    got = await refused(client.infer("echo", [input_at("r", 32)], outputs=[output_at("r", 31, 32)]))
    assert (
        "INVALID_ARGUMENT",
        "shared memory size specified with the request for output 'x' (31 bytes) should be at least 32 bytes to hold "
        "the results",
    ) == got
    assert [0] * 8 == shm.get_contents_as_numpy(handle, np.int32, [8], offset=32).tolist()


async def test_a_region_that_is_unregistered_while_it_is_used(client, core, make_object, memory):
    """A request in flight writes its answer although its region was unregistered meanwhile."""
    key, handle = make_object(64)
    shm.set_shared_memory_region(handle, [X])
    await client.register_system_shared_memory("r", key, 64)
    call = asyncio.create_task(
        client.infer("echo", [input_at("r", 32)], outputs=[output_at("r", 32, 32)], parameters={"wait_for": "go"})
    )
    await core.until(lambda: core.calls)
    await client.unregister_system_shared_memory("r")
    core.gates["go"].set()
    await call
    assert X.tolist() == shm.get_contents_as_numpy(handle, np.int32, [2, 4], offset=32).tolist()


async def test_an_object_that_shrinks_does_not_end_the_server(client, make_object):
    """A region whose object was made smaller is an error of the client, not a crash."""
    key, _ = make_object(8192)
    await client.register_system_shared_memory("r", key, 8192)
    os.truncate(f"/dev/shm{key}", 16)
    got = await refused(client.infer("echo", [input_at("r", 32, 4096)]))
    text = "has shrunk: 0 of 32 bytes"
    assert ("INVALID_ARGUMENT", text) == (got[0], text if text in got[1] else got[1])
    assert await client.is_server_live()


def test_no_more_regions_than_there_are_descriptors_for(make_object):
    """The number of regions is bounded, and what was unregistered makes room."""
    memory = SharedMemory()
    key, _ = make_object(64)
    for i in range(MAX_REGIONS):
        memory.register(str(i), key, 0, 64)
    with pytest.raises(ResourceExhaustedError, match="unregister those not in use"):
        memory.register("more", key, 0, 64)
    memory.unregister("7", SystemRegion)
    memory.register("more", key, 0, 64)
