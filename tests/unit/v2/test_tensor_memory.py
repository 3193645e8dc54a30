"""Memory for tensors that two services map."""

import os
import random
from collections.abc import Iterator

import pytest

from weft.base.core import InferResult
from weft.base.errors import InvalidArgumentError, ResourceExhaustedError
from weft.base.tensors import WireTensor
from weft.v2.protocol import tensor_memory
from weft.v2.protocol.codec import InferMessage
from weft.v2.protocol.tensor_memory import (
    HALF_BYTES,
    MAX_UNREAD_S,
    PARAMETER,
    Blocks,
    TensorMemory,
    TensorMemoryError,
    is_tensor_memory,
    make_tensor_memory,
)
from weft.v2.server.unix_socket import LocalTensorService

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory")


class Clock:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """At 0."""
    return Clock()


@pytest.fixture
def ends(clock: Clock) -> Iterator[tuple[TensorMemory, TensorMemory]]:
    """The caller's end and the service's."""
    descriptor = make_tensor_memory()
    caller = TensorMemory(descriptor, is_service=False, clock_s=clock)
    service = TensorMemory(descriptor, is_service=True, clock_s=clock)
    os.close(descriptor)
    yield caller, service
    caller.close()
    service.close()


def test_tensors_arrive_in_both_directions(ends):
    """What one end writes is what the other reads, whatever its size, and the halves do not touch."""
    caller, service = ends
    contents = [random.Random(size).randbytes(size) for size in (0, 1, 70_000, 3_000_000)]
    written = caller.write(contents)
    reference = service.write_until_read(contents[::-1])
    assert written is not None
    assert service.read(written[1]) == contents
    assert caller.read(reference) == contents[::-1]


def test_a_block_that_was_written_again_is_not_read(ends):
    """A reference to a call that was given up is refused, never answered with another call's tensor."""
    caller, service = ends
    first = caller.write([b"first"])
    caller.free(first[0])
    second = caller.write([b"other"])
    assert first[0] == second[0]
    with pytest.raises(TensorMemoryError):
        service.read(first[1])
    assert service.read(second[1]) == [b"other"]


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "1",
        "x 0 5",
        "1 0 6 -1",
        "1 -64 5",
        "2 0 5",
        f"1 0 {HALF_BYTES}",
        f"1 {HALF_BYTES} 5",
        f"1 {HALF_BYTES - 64} 1",
        f"1 0 {'9' * 400}",
        f"1 0 {'9' * 5000}",
        f"{1 << 70} 0 5",
    ],
)
def test_forged_references_are_refused(ends, reference: str):
    """What is beyond the memory, negative, of another generation, or no number, is not read."""
    caller, service = ends
    caller.write([b"first"])
    with pytest.raises(TensorMemoryError):
        service.read(reference)


def test_a_response_is_kept_until_it_is_read(ends):
    """Its block is written again once it was read, and not before."""
    caller, service = ends
    references = [service.write_until_read([bytes([number])]) for number in range(3)]
    assert caller.read(references[1]) == [b"\1"]
    service.write_until_read([b"new"])
    assert service.num_used == 3
    assert [caller.read(references[number]) for number in (0, 2)] == [[b"\0"], [b"\2"]]


def test_a_response_that_nobody_reads_is_given_up(ends, clock: Clock):
    """After the limit its block is free, and a late reader is refused."""
    caller, service = ends
    late = service.write_until_read([b"old"])
    clock.now_s = MAX_UNREAD_S
    service.write_until_read([b"new"])
    assert service.num_used == 1
    with pytest.raises(TensorMemoryError):
        caller.read(late)


def test_without_room_nothing_is_written(ends):
    """A tensor that does not fit, in all or beside the others, is left to the socket."""
    caller, _ = ends
    block = caller.write([bytes(HALF_BYTES // 2)])
    assert block is not None
    assert caller.write([b"x" * (HALF_BYTES // 2 + 1)]) is None
    caller.free(block[0])
    assert caller.write([bytes(HALF_BYTES)]) is None


def test_nothing_is_read_or_written_after_the_end(ends):
    """A closed end refuses, it does not fail."""
    caller, service = ends
    written = caller.write([b"x"])
    caller.close()
    service.close()
    assert caller.write([b"x"]) is None
    assert not service.write_until_read([b"x"])
    with pytest.raises(TensorMemoryError):
        service.read(written[1])


def test_memory_that_could_shrink_is_refused():
    """Memory without seals or of another size is not mapped: reading it could kill this process."""
    sealed, unsealed, short = make_tensor_memory(), os.memfd_create("x"), os.memfd_create("y")
    os.ftruncate(unsealed, 2 * HALF_BYTES)
    os.ftruncate(short, 4096)
    try:
        assert [True, False, False, False] == [is_tensor_memory(number) for number in (sealed, unsealed, short, 0)]
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(sealed, 4096)
    finally:
        for descriptor in (sealed, unsealed, short):
            os.close(descriptor)


def test_blocks_never_overlap(monkeypatch: pytest.MonkeyPatch):
    """Over a random history of sizes, blocks in use are apart and within the range."""
    monkeypatch.setattr(tensor_memory, "_MIN_ORDER", 4)
    rng = random.Random(1)
    blocks, used = Blocks(4096), dict[int, int]()
    for _ in range(5000):
        if used and rng.random() < 0.5:
            offset = rng.choice([*used])
            del used[offset]
            blocks.give(offset)
            continue
        size = rng.randrange(1, 1500)
        offset = blocks.take(size)
        if offset < 0:
            assert used
            continue
        assert offset + size <= 4096
        assert all(offset + size <= other or other + length <= offset for other, length in used.items())
        used[offset] = size
    assert blocks.num_used == len(used)


@pytest.fixture
def memories(tmp_path):
    """A service that does not listen, with memory of the token ``t``, and the caller's end of it."""
    service = LocalTensorService(tmp_path / "s", max_message_bytes=1_000_000)
    descriptor = make_tensor_memory()
    service._memories["t"] = TensorMemory(descriptor, is_service=True)
    caller = TensorMemory(descriptor, is_service=False)
    os.close(descriptor)
    yield service, caller
    service._memories["t"].close()
    caller.close()


def request_to(reference: str) -> InferMessage:
    """A request that refers to memory."""
    return InferMessage("m", parameters={PARAMETER: reference})


def result(contents, parameters=()):
    outputs = {f"O{index}": WireTensor("UINT8", (len(data),), data) for index, data in enumerate(contents)}
    return InferResult("m", "1", "", dict(parameters), outputs)


def test_a_small_request_may_have_a_large_response(memories):
    """A request that only offers memory gets its response there, without the parameter of a model that forges one."""
    service, caller = memories
    request, memory = service.received(request_to("t"))
    assert not request.parameters
    small = service.answered(result([b"small"], {PARAMETER: "1 0 5"}), memory)
    assert (small.contents, small.parameters) == ([b"small"], {})
    large = service.answered(result([b"x" * 500_000, b"y"]), memory)
    assert not large.contents
    assert caller.read(large.parameters[PARAMETER]) == [b"x" * 500_000, b"y"]


def test_memory_is_no_way_around_the_limit_of_messages(memories):
    """Tensors larger than a message may be are refused there too, and so are tensors given twice."""
    service, caller = memories
    with pytest.raises(ResourceExhaustedError, match="1000001 vs"):
        service.received(request_to(f"t {caller.write([bytes(1_000_001)])[1]}"))
    request = request_to(f"t {caller.write([b'x'])[1]}")
    request.contents.append(b"y")
    with pytest.raises(InvalidArgumentError, match="give one of them"):
        service.received(request)
