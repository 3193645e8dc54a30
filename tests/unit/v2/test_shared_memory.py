"""Tensors in shared memory, between tritonclient and a real server."""

import asyncio
import errno
import json
import os
import uuid
from pathlib import Path

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tests.case_files import Case, cases
from tests.unit.v2.builders import refused
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

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


class Client:
    """Makes the calls of a case on one object of shared memory, which has X."""

    def __init__(self, client, core, memory_object, at):
        self._client, self._core = client, core
        self._key, self._handle = memory_object
        self._starts = {}
        shm.set_shared_memory_region(self._handle, [X], offset=at)

    async def call(self, verb, *arguments):
        """What is answered, or why not."""
        given = [each[0] * each[1] if isinstance(each, list) else each for each in arguments]
        try:
            answer = await getattr(self, verb)(*given)
        except InferenceServerException as error:
            answer = f"{error.status().removeprefix('StatusCode.')}: {error.message()}"
        return answer.replace(self._key, "KEY")

    async def register(self, region, key, num_bytes, offset):
        """A region of an object."""
        key = self._key if key == "KEY" else key
        await self._client.register_system_shared_memory(region, key, num_bytes, offset)
        self._starts[region] = offset
        return "registered"

    async def unregister(self, region):
        """One or all."""
        await self._client.unregister_system_shared_memory(region)
        return "unregistered"

    async def status(self, region):
        """One or all."""
        status = await self._client.get_system_shared_memory_status(region, as_json=True)
        return json.dumps(list(status.get("regions", {}).values()))

    async def truncate(self, num_bytes):
        """The object gets this size."""
        os.truncate(f"/dev/shm{self._key}", num_bytes)
        return "done"

    async def infer(self, given):
        """What the server got, and where and how the answer came."""
        place = given["region"], given["bytes"], given.get("offset", 0)
        tensor = input_at(*place, given.get("shape", X.shape), given.get("datatype", "INT32"))
        outputs = [output_at(*given["to"])] if "to" in given else None
        result = await self._client.infer("echo", [tensor], outputs=outputs)
        shown = {"got": np.frombuffer(self._core.calls[-1][0].inputs["x"].data, np.int32).tolist()}
        if outputs:
            parameters = result.get_output("x").parameters.items()
            shown |= {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters}
            assert [b""] == list(result.get_response().raw_output_contents)
            written = shm.get_contents_as_numpy(
                self._handle, np.uint8, [32], offset=given["to"][2] + self._starts[given["to"][0]]
            )
            shown["written"] = written.view(np.int32).tolist()
        return json.dumps(shown, sort_keys=True)


@cases(Path(__file__).with_name("shared_memory.txt"))
async def test_calls(client, core, make_object, monkeypatch, case: Case):
    """Regions and requests are answered as the case says."""
    if case.option("reads") == "nothing":
        monkeypatch.setattr(SystemRegion, "read", lambda *_: pytest.fail("it was read"))
    made = Client(client, core, make_object(int(case.option("bytes"))), int(case.option("at")))
    answers = [await made.call(*json.loads(line)) for line in case.text.split("\n")]
    case.check_script(lambda _: [answers.pop(0)])


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


async def test_the_server_says_what_it_offers(client):
    """The extension is named where it is on."""
    assert "system_shared_memory" in (await client.get_server_metadata()).extensions


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
