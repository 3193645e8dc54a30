"""Mutated byte streams into either end of the wire; ``make fuzz-wire`` has a million of them."""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.wire import corpus
from tests.wire.arena import Arena, Attack, arena
from tests.wire.echo_process import EchoService
from tests.wire.fuzz import Fuzzer, check_output
from tests.wire.peer import PREFACE, data, frame

pytestmark = pytest.mark.long

NUM_STREAMS = int(os.environ.get("WEFT_FUZZ_STREAMS", "2000"))
#: Streams that once failed, by seed and number; each is done again.
ONCE_FAILED = ((1, 27829), (1, 527121))


async def test_mutated_streams() -> None:
    """Neither end fails, hangs, keeps anything or leaves a call without an end, and a neighbour is answered."""
    fuzzer = Fuzzer(seed=7)
    await fuzzer.run(range(NUM_STREAMS))
    assert [] == fuzzer.failures
    ends = {end.partition(": ")[2] for end in fuzzer.counts}
    assert {"no error", "PROTOCOL_ERROR", "COMPRESSION_ERROR", "OK", "UNAVAILABLE", "INTERNAL"} <= ends


@pytest.mark.parametrize(("seed", "number"), ONCE_FAILED)
async def test_streams_that_once_failed(seed: int, number: int) -> None:
    """Streams that found a fault are borne now."""
    fuzzer = Fuzzer(seed)
    await fuzzer.run(range(number, number + 1))
    assert [] == fuzzer.failures


async def test_streams_without_mutation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What mutations start from is valid: either end takes it to its end."""
    monkeypatch.setattr("tests.wire.fuzz.mutated", lambda stream, *_: stream)
    fuzzer = Fuzzer(seed=1)
    with fuzzer.watching():
        for number in range(0, 200, 2):
            await fuzzer.play(number)
    assert [] == fuzzer.failures
    assert {"server: no error"} == set(fuzzer.counts)


async def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception on PRIORITY, and a call that is not told that it was reset, are found with the stream's number."""
    monkeypatch.setattr("weft.wire.connection.streams.StreamStates._on_priority", lambda *_: {}["planted"])
    fuzzer = Fuzzer(seed=1)
    await fuzzer.run(range(1500))
    assert any("KeyError('planted')" in failure.what for failure in fuzzer.failures)


def test_one_seed_gives_one_stream() -> None:
    """So a failure can be done again by its number."""
    streams = list(corpus.client_streams().values())
    made = [corpus.mutated(streams[3], streams, random.Random("7:3")) for _ in range(2)]
    assert made[0] == made[1] != streams[3]
    assert made[0] == b"".join(corpus.cut(made[0], random.Random(1)))


@pytest.mark.parametrize(
    "written",
    [
        frame(0x20),
        frame(4, length=6),
        data(1, b"a", end=True) + data(1, b"b"),
        frame(9, 4, 1),
        frame(1, 0, 1) * 2,
    ],
    ids=["unknown", "half", "after the end", "no block", "interrupted"],
)
def test_what_is_no_http2_is_noticed(written: bytes) -> None:
    """What an end writes is checked for whole, known frames in their order."""
    with pytest.raises(AssertionError):
        check_output(PREFACE + written, is_client=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A service of our own, and its neighbour."""
    with EchoService("weft", tmp_path_factory.mktemp("fuzz") / "log") as echo, arena(echo) as made:
        yield made


def test_mutated_streams_through_sockets(shared: Arena) -> None:
    """A service bears them too, answers its neighbour meanwhile, and nothing is left of them."""

    def run(made: Arena) -> str:
        streams = list(corpus.client_streams().values())
        for number in range(NUM_STREAMS // 10):
            generator = random.Random(f"sockets:{number}")
            peer = made.peer(greets=False)
            for piece in corpus.cut(corpus.mutated(generator.choice(streams), streams, generator), generator):
                if not peer.try_send(piece):
                    break
            with contextlib.suppress(OSError):
                peer.socket.setblocking(False)
                peer.socket.recv(1 << 16)
            peer.abort() if generator.random() < 0.5 else peer.close()
        return "borne"

    outcome = shared.play(Attack("mutated streams", run, max_mib=32.0))
    assert outcome.num_calls > 1


def test_recordings_are_whole() -> None:
    """Each recording is whole frames, and those of clients begin with the preface."""
    for path in (Path(__file__).parent / "recordings").iterdir():
        stream = path.read_bytes()
        assert stream.startswith(PREFACE) == (path.suffix == ".client"), path
        assert all(len(piece) >= 9 for piece in corpus.frames_of(stream)), path
