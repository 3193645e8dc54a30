"""CUDA shared memory between tritonclient and a real server; a CUDA made of host memory stands in for the library."""

import asyncio
import base64
import ctypes
import gc

import numpy as np
import pytest
from tests.unit.v2.builders import refused
from tritonclient.grpc import aio

from weft.base.errors import InternalError, UnsupportedError
from weft.v2.protocol import cuda_memory
from weft.v2.protocol.cuda_memory import HANDLE_BYTES, Cuda
from weft.v2.protocol.shared_memory import SharedMemory

X = np.arange(8, dtype=np.int32).reshape(2, 4)
INVALID_VALUE, NO_DEVICE = 1, 100


class HostCuda:
    """``libcudart`` and ``libcuda`` as far as they are called; the memory of its two devices is host memory."""

    def __init__(self):
        self.memory = {}  # by handle
        self.opened = []
        self.device = None
        self.num_devices = 2
        self.copied_on = []
        self.waiting = []  # copies that no synchronisation has finished
        self.pinned = {}  # memory and device by address
        self.fails = {}  # status by function

    def share(self, num_bytes):
        """A handle of new memory, as another process would make it."""
        handle = bytes([len(self.memory)]) * HANDLE_BYTES
        self.memory[handle] = ctypes.create_string_buffer(num_bytes)
        return handle

    def cudaGetErrorString(self, status):  # noqa: N802  # CUDA's names here and below
        return {INVALID_VALUE: b"invalid argument", NO_DEVICE: b"no CUDA-capable device is detected"}[status.value]

    def cudaGetDeviceCount(self, count):  # noqa: N802
        count._obj.value = self.num_devices
        return 0 if self.num_devices else NO_DEVICE

    def cuCtxGetCurrent(self, context):  # noqa: N802
        context._obj.value = None if self.device is None else self.device + 1
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.device = context.value - 1 if context.value else None
        return 0

    def cudaSetDevice(self, device):  # noqa: N802
        self.device = device.value
        return 0

    def cudaIpcOpenMemHandle(self, address, handle, flags):  # noqa: N802
        memory = self.memory.get(bytes(handle.reserved))
        if memory is None or flags.value != 1:
            return INVALID_VALUE
        address._obj.value = ctypes.addressof(memory)
        self.opened.append((ctypes.addressof(memory), self.device))
        return 0

    def cudaIpcCloseMemHandle(self, address):  # noqa: N802
        self.opened.remove((address.value, self.device))
        return 0

    def cuMemGetAddressRange_v2(self, base, size, address):  # noqa: N802
        memory = next(m for m in self.memory.values() if ctypes.addressof(m) == address.value)
        base._obj.value, size._obj.value = address.value, len(memory)
        return self.fails.get("cuMemGetAddressRange_v2", 0)

    def cudaStreamCreateWithFlags(self, stream, flags):  # noqa: N802
        stream._obj.value = 0x1000 + self.device
        return 0 if flags.value == 1 else INVALID_VALUE

    def cudaMemcpyAsync(self, target, source, num_bytes, kind, stream):  # noqa: N802
        self.copied_on.append((self.device, stream.value))
        self.waiting.append((target.value, source.value, num_bytes.value))
        return self.fails.get("cudaMemcpyAsync", 0)

    def cudaStreamSynchronize(self, stream):  # noqa: N802
        for copy in self.waiting:
            ctypes.memmove(*copy)
        self.waiting.clear()
        return 0

    def cudaHostAlloc(self, address, num_bytes, flags):  # noqa: N802
        pinned = ctypes.create_string_buffer(num_bytes.value)
        self.pinned[ctypes.addressof(pinned)] = pinned, self.device
        address._obj.value = ctypes.addressof(pinned)
        return self.fails.get("cudaHostAlloc", 0)

    def cudaFreeHost(self, address):  # noqa: N802
        del self.pinned[address.value]
        return 0


@pytest.fixture
def host():
    """What stands in for CUDA."""
    return HostCuda()


@pytest.fixture
def memory(host):
    """What the server knows of shared memory; it has CUDA."""
    return SharedMemory(lambda: Cuda(host, host))


async def register(client, name, handle, num_bytes, device_id=0):
    """Registers as tritonclient does: the handle travels through base64."""
    await client.register_cuda_shared_memory(name, base64.b64encode(handle), device_id, num_bytes)


def tensors_at(region, offset=0, num_bytes=X.nbytes, answer_offset=64):
    """An input and an output ``x`` that lie in a region."""
    tensor, output = aio.InferInput("x", list(X.shape), "INT32"), aio.InferRequestedOutput("x")
    tensor.set_shared_memory(region, num_bytes, offset)
    output.set_shared_memory(region, num_bytes, answer_offset)
    return {"inputs": [tensor], "outputs": [output]}


async def test_a_request_and_its_answer_on_a_device(client, core, host):
    """Input and output lie on device 1, are copied on a stream there, and the thread is left without a device again."""
    handle = host.share(128)
    host.memory[handle][8 : 8 + X.nbytes] = X.tobytes()
    await register(client, "r", handle, 128, device_id=1)
    result = await client.infer("echo", **tensors_at("r", offset=8))
    assert X.tobytes() == core.calls[-1][0].inputs["x"].data
    assert X.tobytes() == host.memory[handle][64 : 64 + X.nbytes]
    assert [b""] == list(result.get_response().raw_output_contents)
    assert ([(1, 0x1001)] * 2, None) == (host.copied_on, host.device)


async def test_status_and_unregister(client, host):
    """Both extensions are offered; regions are listed apart from those of the system, and closed in the end."""
    extensions = (await client.get_server_metadata()).extensions
    assert {"system_shared_memory", "cuda_shared_memory"} <= set(extensions)
    await register(client, "a", host.share(64), 64, device_id=1)
    await register(client, "b", host.share(64), 32)
    one = await client.get_cuda_shared_memory_status("a", as_json=True)
    assert {"regions": {"a": {"name": "a", "device_id": "1", "byte_size": "64"}}} == one
    assert {} == await client.get_system_shared_memory_status(as_json=True)
    assert (
        "NOT_FOUND",
        "The region named 'a' is registered as CUDA shared memory, not system shared memory",
    ) == await refused(client.get_system_shared_memory_status("a"))
    await client.unregister_system_shared_memory()
    await client.unregister_cuda_shared_memory("a")
    await client.unregister_cuda_shared_memory("a")
    assert ["b"] == list((await client.get_cuda_shared_memory_status()).regions)
    await client.unregister_cuda_shared_memory()
    assert ([], []) == (list((await client.get_cuda_shared_memory_status()).regions), host.opened)


REFUSALS = [
    ("a", None, 64, 0, "ALREADY_EXISTS", "shared memory region 'a' already in manager"),
    ("", None, 64, 0, "INVALID_ARGUMENT", "needs a name"),
    ("b", None, 65, 0, "INVALID_ARGUMENT", "byte_size is 65; the memory behind the handle has 64 bytes"),
    ("b", None, 2**64 - 1, 0, "INVALID_ARGUMENT", "the memory behind the handle has 64 bytes"),
    ("b", None, 0, 0, "INVALID_ARGUMENT", "a region at least 1"),
    ("b", None, 64, 2, "INVALID_ARGUMENT", "CUDA device 2 does not exist; this process has 0 to 1"),
    ("b", None, 64, -1, "INVALID_ARGUMENT", "CUDA device -1 does not exist"),
    ("b", None, 64, 2**32, "INVALID_ARGUMENT", "CUDA device 4294967296 does not exist"),
    ("b", b"", 64, 0, "INVALID_ARGUMENT", "raw_handle has 0 bytes, a cudaIpcMemHandle_t has 64"),
    ("b", bytes(65), 64, 0, "INVALID_ARGUMENT", "raw_handle has 65 bytes"),
    ("b", b"\xff" * 64, 64, 0, "INVALID_ARGUMENT", "CUDA cannot open the handle: invalid argument (error 1)"),
]


async def test_bad_regions(client, host):
    """A region that cannot be is refused with the reason, and nothing stays open for it."""
    known = host.share(64)
    await register(client, "a", known, 64)
    for name, handle, num_bytes, device_id, status, text in REFUSALS:
        got = await refused(register(client, name, known if handle is None else handle, num_bytes, device_id))
        assert (status, text) == (got[0], text if text in got[1] else got[1])
    gc.collect()
    assert 1 == len(host.opened)


async def test_memory_whose_size_is_unknown_is_refused(client, host):
    """Without its size a region has no bounds to hold, so that it is closed again."""
    host.fails["cuMemGetAddressRange_v2"] = INVALID_VALUE
    status, text = await refused(register(client, "r", host.share(64), 64))
    assert ("INVALID_ARGUMENT", True, []) == (status, "does not tell the size" in text, host.opened)


async def test_bad_places_and_copies_that_fail(client, host):
    """An input outside its region is refused, and nothing is copied; what CUDA says against a copy is INTERNAL."""
    await register(client, "r", host.share(128), 128)
    for offset, num_bytes in ((97, 32), (0, 129), (2**62, 2**62)):
        status, text = await refused(client.infer("echo", **tensors_at("r", offset, num_bytes)))
        assert ("INVALID_ARGUMENT", []) == (status, host.copied_on)
        assert "Invalid offset + byte size for shared memory region: 'r'" in text
    host.fails["cudaMemcpyAsync"] = INVALID_VALUE
    status, text = await refused(client.infer("echo", **tensors_at("r")))
    assert ("INTERNAL", True) == (status, "CUDA cannot copy 32 bytes: invalid argument (error 1)" in text)
    assert await client.is_server_live()


async def test_a_region_that_is_unregistered_while_it_is_used(client, core, host):
    """A request in flight writes its answer although its region was unregistered meanwhile; then the handle closes."""
    handle = host.share(128)
    host.memory[handle][: X.nbytes] = X.tobytes()
    await register(client, "r", handle, 128)
    call = asyncio.create_task(client.infer("echo", **tensors_at("r"), parameters={"wait_for": "go"}))
    await core.until(lambda: core.calls)
    await client.unregister_cuda_shared_memory("r")
    assert 1 == len(host.opened)
    core.gates["go"].set()
    await call
    assert X.tobytes() == host.memory[handle][64 : 64 + X.nbytes]
    gc.collect()
    assert [] == host.opened


def test_no_device_is_told_with_its_reason(host):
    """Where CUDA finds no device, the error has CUDA's own words."""
    host.num_devices = 0
    with pytest.raises(Exception, match=r"this process has none \(no CUDA-capable device is detected \(error 100\)\)"):
        Cuda(host, host).check_device(0)


def test_pinned_memory_is_that_of_the_instance(host):
    """It is pinned and freed with the device given, and what was current is so again; a failure says how much."""
    cuda, host.device = Cuda(host, host), 0
    address = cuda.allocate_pinned(64, 1)
    assert [(64, 1)] == [(len(memory), device) for memory, device in host.pinned.values()]
    cuda.free_pinned(address, 1)
    assert ({}, 0) == (host.pinned, host.device)
    host.fails["cudaHostAlloc"] = INVALID_VALUE
    with pytest.raises(InternalError, match=r"CUDA cannot pin 4096 bytes of host memory: invalid argument"):
        cuda.allocate_pinned(4096, 0)


def test_a_machine_without_the_libraries(monkeypatch):
    """The error names the library that is missing and what brings it, and has Triton Inference Server's words."""
    monkeypatch.setattr(cuda_memory, "_DRIVER", "libweft-no-such.so.1")
    cuda_memory.find_cuda.cache_clear()
    with pytest.raises(
        UnsupportedError,
        match=r"region: 'r', GPUs not supported: libweft-no-such.so.1: cannot open .*; it comes with the NVIDIA driver",
    ):
        SharedMemory().register_cuda("r", bytes(HANDLE_BYTES), 0, 64)
    monkeypatch.setattr(cuda_memory, "_DRIVER", "libc.so.6")
    monkeypatch.setattr(cuda_memory, "_RUNTIMES", ("libweft-no-such.so.13",))
    with pytest.raises(UnsupportedError, match=r"neither libweft-no-such.so.13 is on the .* install a CUDA build"):
        cuda_memory.find_cuda()


def test_the_runtime_that_pip_installed_is_found(monkeypatch, tmp_path):
    """A library in a folder of the ``nvidia`` packages is used if the loader has none."""
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libweft-no-such.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cuda_memory, "_RUNTIMES", (library.name,))
    assert [str(library)] == cuda_memory._installed_runtimes()
