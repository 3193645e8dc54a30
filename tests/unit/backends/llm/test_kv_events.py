"""KV events on the wire: a subscriber knows what the prefix cache has, by vLLM's hashes."""

import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import zmq
from tests.unit.backends.llm.builders import make_request
from tests.unit.backends.llm.conftest import make_tokenizer
from tests.unit.backends.llm.test_block_hashes import write_folder
from tests.unit.llm.engine_fixture import Answer, answer_in_turn, make_engine, random_prompts

from weft.backends.llm import LlmBackend
from weft.backends.llm.kv_events import KvEventPublisher, KvEventsConfig
from weft.backends.llm.settings import read_settings
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.llm.request import EngineRequest, SamplingParams
from weft.serving.backends.base import Batch, InstanceContext, ModelContext
from weft.serving.metrics import ExportedMetrics

_WAIT_MS = 20_000
#: What vLLM's ``hash_block_tokens`` gives with ``sha256_cbor`` and PYTHONHASHSEED=42 for blocks of the 16 tokens from
#: 100 on.
_PLAIN = [6658331277240515430, 8353329011930047756, 14506936240885662265]
#: Likewise of the first two of the adapter ``sql`` and the salt ``tenant``.
_OF_TENANT = [857721701395184921, 14689567180745290714]


class Subscriber:
    """Keeps the blocks that the messages tell of, as a router does."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(topic)
        self._socket.connect(endpoint)
        self.blocks: set[int] = set()
        self.events: list[list[Any]] = []
        self.numbers: list[int] = []

    def read(self) -> None:
        assert self._socket.poll(_WAIT_MS), "no message"
        _, number, payload = self._socket.recv_multipart()
        self.numbers.append(int.from_bytes(number, "big"))
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        at_s, events, rank = msgpack.unpackb(payload)
        assert abs(time.time() - at_s) < 60
        assert 0 == rank
        for event in events:
            if event[0] == "AllBlocksCleared":
                self.blocks.clear()
            elif event[0] == "BlockStored":
                assert len(event[1]) * event[4] == len(event[3])
                self.blocks |= set(event[1])
            else:
                self.blocks -= set(event[1])
        self.events += events

    def read_until(self, number: int) -> None:
        while len(self.blocks) != number:
            self.read()

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def subscriber(endpoint: str) -> Iterator[Subscriber]:
    made = Subscriber(endpoint)
    yield made
    made.close()


def _publisher(endpoint: str, block_size: int = 16, **fields: Any) -> KvEventPublisher:
    return KvEventPublisher(KvEventsConfig(endpoint=endpoint, hash_seed="42", **fields), block_size, 64)


def _request(**fields: Any) -> EngineRequest:
    lora_name = fields.pop("lora_name", "")
    return EngineRequest(np.zeros(1, np.int32), SamplingParams(lora_name=lora_name), lambda delta: None, **fields)


def _joined(publisher: KvEventPublisher, subscriber: Subscriber) -> None:
    """The subscriber gets what is published from now on."""
    number = 0
    while not subscriber.events:
        publisher.stored(_request(), [b"%16d" % number], array("i", range(number, number + 16)), 0)
        number += 1
        if subscriber._socket.poll(50):
            subscriber.read()
    for index in range(number):
        publisher.removed(b"%16d" % index)
    while subscriber.blocks or subscriber._socket.poll(100):
        subscriber.read()
    subscriber.events.clear()


def test_hashes_and_fields_are_those_of_vllm(endpoint: str, subscriber: Subscriber) -> None:
    """Of a text in three steps, and of one with an adapter and a salt, which is part of the first block's hash only."""
    publisher = _publisher(endpoint)
    _joined(publisher, subscriber)
    tokens, hashes = array("i", range(100, 148)), [b"a" * 16, b"b" * 16, b"c" * 16]
    for index in range(3):
        publisher.stored(_request(), hashes, tokens, index)
    of_tenant = _request(lora_name="sql", salt=b"tenant")
    for index in range(2):
        publisher.stored(of_tenant, [b"d" * 16, b"e" * 16], tokens, index)
    publisher.removed(hashes[2])
    subscriber.read_until(4)
    plain, tenant, removed = subscriber.events
    ids = tokens.tolist()
    assert ["BlockStored", _PLAIN, None, ids, 16, None, "GPU", None, [None] * 3] == plain
    extra = [["sql", "tenant"], ["sql"]]
    assert ["BlockStored", _OF_TENANT, None, ids[:32], 16, None, "GPU", "sql", extra] == tenant
    assert ["BlockRemoved", [_PLAIN[2]], "GPU"] == removed
    publisher.stored(_request(), hashes, tokens, 2)
    subscriber.read_until(5)
    assert [[_PLAIN[2]], _PLAIN[1]] == subscriber.events[-1][1:3]
    publisher.close()
    subscriber.read_until(0)


def test_a_subscriber_knows_what_the_engine_has_cached(endpoint: str, subscriber: Subscriber) -> None:
    """After prompts with common beginnings, and many more than the cache holds: no more and no less."""
    engine = make_engine(num_blocks=24)
    publisher = engine.pool.observer = _publisher(endpoint)
    _joined(publisher, subscriber)
    common = random_prompts(1, 40, 40)[0]
    prompts = [common + prompt for prompt in random_prompts(12, 20, 60)]
    answer_in_turn(engine, [[Answer(prompt, max_tokens=20)] for prompt in prompts])
    assert engine.pool.observer is publisher
    cached = sum(block_hash is not None for block_hash in engine.pool._hash)
    subscriber.read_until(cached)
    stored = [event for event in subscriber.events if event[0] == "BlockStored"]
    known = {number for event in stored for number in event[1]}
    assert any(event[0] == "BlockRemoved" for event in subscriber.events)
    assert all(event[2] is None or event[2] in known for event in stored)
    assert {"sent": publisher.outcomes["sent"], "dropped": 0} == dict(publisher.outcomes)
    assert list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1)) == subscriber.numbers
    publisher.close()


def test_a_full_queue_drops_and_says_so(endpoint: str, subscriber: Subscriber) -> None:
    """The engine does not wait; a subscriber then knows fewer blocks than there are, and none that has gone."""
    publisher = _publisher(endpoint, max_queue_size=8)
    _joined(publisher, subscriber)
    cached: set[bytes] = set()
    start_s = time.monotonic()
    for index in range(20_000):
        block_hash = b"%16d" % (1000 + index)
        publisher.stored(_request(), [block_hash], array("i", [index] * 16), 0)
        if index >= 50:
            publisher.removed(b"%16d" % (950 + index))
    assert time.monotonic() - start_s < 20
    cached = {b"%16d" % (20_950 + index) for index in range(50)}
    assert publisher.outcomes["dropped"] > 10_000
    while subscriber._socket.poll(500):
        subscriber.read()
    publisher.stored(_request(), [b"%16d" % 1], array("i", [1] * 16), 0)
    while not publisher._inbox.empty() or subscriber._socket.poll(500):
        subscriber.read()
    ours = {
        int.from_bytes(publisher._hashes[one][-8:], "big") for one in cached | {b"%16d" % 1} if one in publisher._hashes
    }
    assert subscriber.blocks <= ours
    assert ["AllBlocksCleared"] in subscriber.events
    publisher.close()


def test_missed_messages_are_sent_again(endpoint: str, tmp_path: Path) -> None:
    """From a number on, to whoever asks the replay address, with a message that ends them; nonsense is ignored."""
    replay = f"ipc://{tmp_path}/replay"
    publisher = _publisher(endpoint, replay_endpoint=replay)
    for index in range(3):
        publisher.stored(_request(), [b"%16d" % index], array("i", [index] * 16), 0)
        while publisher.outcomes["sent"] <= index:
            time.sleep(0.001)
    late = Subscriber(endpoint)
    asker = late._context.socket(zmq.DEALER)
    asker.connect(replay)
    asker.send(b"what")
    asker.send_multipart([b"", (0).to_bytes(8, "big")])
    numbers = []
    while True:
        assert asker.poll(_WAIT_MS)
        _, number, payload = asker.recv_multipart()
        if number == (-1).to_bytes(8, "big", signed=True):
            break
        numbers.append(int.from_bytes(number, "big"))
        late.apply(payload)
    assert numbers == list(range(len(numbers)))
    assert ["AllBlocksCleared"] == late.events[0]
    assert 3 == len(late.blocks)
    late.close()
    publisher.close()


def test_an_address_in_use_is_taken_when_it_is_free(tmp_path: Path) -> None:
    """A process that replaces another serves meanwhile."""
    with zmq.Context() as context:
        holder = context.socket(zmq.PUB)
        port = holder.bind_to_random_port("tcp://127.0.0.1")
        publisher = _publisher(f"tcp://*:{port}")
        assert publisher.outcomes["sent"] == 0
        holder.close(linger=0)
    subscriber = Subscriber(f"tcp://127.0.0.1:{port}")
    _joined(publisher, subscriber)
    publisher.close()
    subscriber.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://*:5557", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"endpoint": ""}', "endpoint must be like"),
        ('{"endpoint": "*:5557"}', "endpoint must be like"),
        ('{"endpoint": 5557}', "endpoint must be a text"),
        ('{"hwm": 0}', "hwm must be a whole number from 1"),
        ('{"hwm": true}', "hwm must be a whole number"),
        ('{"topics": "x"}', "unknown field 'topics'; did you mean 'topic'"),
        ('{"enable_kv_cache_events": false}', "remove kv_events"),
        ('{"publisher": "null"}', "publisher must be 'zmq'"),
    ],
)
def test_bad_configurations(text: str, words: str) -> None:
    """The message has the field, the value and the cure."""
    signature = ModelSignature("m", "1", "llm", 0, (), ())
    with pytest.raises(InvalidArgumentError, match="model 'm': parameter 'kv_events'") as caught:
        read_settings(ModelContext(signature, Path(), {}, {"kv_events": text}))
    assert words in caught.value.message


def test_a_model_publishes_by_its_parameter(tmp_path: Path, endpoint: str, subscriber: Subscriber) -> None:
    """With vLLM's own configuration; metrics count it. Without a prefix cache it is refused."""
    signature = ModelSignature("m", "1", "llm", 0, (), (), is_decoupled=True)
    text = f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "{endpoint}", "topic": "kv@a@m"}}'
    parameters = {"kv_events": text, "num_blocks": "16", "block_size": "8", "dtype": "float32"}
    exports = ExportedMetrics()
    folder = write_folder(tmp_path / "m", vocab_size=261)
    make_tokenizer(folder / "tokenizer.json")
    model = ModelContext(signature, folder, {}, parameters, exports=exports)
    backend = LlmBackend(model, InstanceContext("m_0", "CPU"))
    backend.check()
    backend.load()
    number = 0
    while not subscriber.blocks:  # the first messages go to nobody
        number += 1
        assert number < 1000
        backend.execute(Batch([make_request(text_input=f"{number} is a text of blocks", outputs=("text_output",))]))
        while subscriber._socket.poll(50):
            subscriber.read()
    (metric,) = [one for one in exports.collect() if one.name == "weft_llm_kv_events"]
    assert {"sent", "dropped"} == {sample.labels["outcome"] for sample in metric.samples}
    backend.close()
    subscriber.read_until(0)
    with pytest.raises(InvalidArgumentError, match="kv_events needs enable_prefix_caching"):
        read_settings(ModelContext(signature, Path(), {}, parameters | {"enable_prefix_caching": "false"}))
