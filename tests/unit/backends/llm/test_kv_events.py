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
#: 100 on, and for the first two of the adapter ``sql`` and the salt ``tenant``.
_PLAIN = [6658331277240515430, 8353329011930047756, 14506936240885662265]
_OF_TENANT = [857721701395184921, 14689567180745290714]


class Subscriber:
    """Keeps the blocks that the messages tell of, as a router does."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe("")
        self.socket.connect(endpoint)
        self.blocks: set[int] = set()
        self.events: list[list[Any]] = []

    def apply(self, payload: bytes) -> None:
        _, events, _ = msgpack.unpackb(payload)
        for event in events:
            if event[0] == "AllBlocksCleared":
                self.blocks.clear()
            elif event[0] == "BlockStored":
                self.blocks |= set(event[1])
            else:
                self.blocks -= set(event[1])
        self.events += events

    def read_until(self, number: int) -> None:
        while len(self.blocks) != number:
            assert self.socket.poll(_WAIT_MS), "no message"
            self.apply(self.socket.recv_multipart()[2])

    def read_rest(self) -> None:
        while self.socket.poll(300):
            self.apply(self.socket.recv_multipart()[2])

    def join(self, publisher: KvEventPublisher) -> None:
        """It gets what is published from now on."""
        while not self.events:  # the first messages go to nobody
            store(publisher, b"first")
            publisher.removed(b"first")
            self.read_rest()
        self.events.clear()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def subscriber(endpoint: str) -> Iterator[Subscriber]:
    made = Subscriber(endpoint)
    yield made
    made.context.destroy(linger=0)


@pytest.fixture
def publish(endpoint: str) -> Iterator[Any]:
    made = []

    def make(**fields: Any) -> KvEventPublisher:
        made.append(KvEventPublisher(KvEventsConfig(**{"endpoint": endpoint, "hash_seed": "42"} | fields), 16, 64))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def store(publisher: KvEventPublisher, *hashes: bytes, lora_name: str = "", salt: bytes = b"") -> None:
    """The last of a sequence's blocks, of the tokens from 100 on, is cached."""
    request = EngineRequest(np.zeros(1, np.int32), SamplingParams(lora_name=lora_name), lambda delta: None, salt=salt)
    publisher.stored(request, hashes, array("i", range(100, 148)), len(hashes) - 1)


def test_hashes_and_fields_are_those_of_vllm(publish: Any, subscriber: Subscriber) -> None:
    """Also with an adapter, and a salt, which only the first block's hash has; hashes go on from their parents."""
    publisher = publish()
    subscriber.join(publisher)
    for number in range(1, 4):
        store(publisher, *(b"a", b"b", b"c")[:number])
    for number in range(1, 3):
        store(publisher, *(b"d", b"e")[:number], lora_name="sql", salt=b"tenant")
    publisher.removed(b"c")
    subscriber.read_until(4)
    store(publisher, b"a", b"b", b"c")
    subscriber.read_until(5)
    ids, extra = list(range(100, 148)), [["sql", "tenant"], ["sql"]]
    plain = ["BlockStored", _PLAIN, None, ids, 16, None, "GPU", None, [None] * 3]
    tenant = ["BlockStored", _OF_TENANT, None, ids[:32], 16, None, "GPU", "sql", extra]
    again = ["BlockStored", _PLAIN[2:], _PLAIN[1], ids[32:], 16, None, "GPU", None, [None]]
    assert [plain, tenant, ["BlockRemoved", [_PLAIN[2]], "GPU"], again] == subscriber.events


def test_a_subscriber_knows_what_the_engine_has_cached(publish: Any, subscriber: Subscriber) -> None:
    """After prompts with common beginnings, and many more than the cache holds: no more and no less."""
    engine = make_engine(num_blocks=24)
    publisher = engine.pool.observer = publish()
    subscriber.join(publisher)
    (common,) = random_prompts(1, 40, 40)
    prompts = [common + prompt for prompt in random_prompts(12, 20, 60)]
    answer_in_turn(engine, [[Answer(prompt, max_tokens=20)] for prompt in prompts])
    subscriber.read_rest()
    assert len(subscriber.blocks) == sum(block_hash is not None for block_hash in engine.pool._hash)
    stored = [event for event in subscriber.events if event[0] == "BlockStored"]
    known = {number for event in stored for number in event[1]}
    assert all(event[2] is None or event[2] in known for event in stored)
    assert len(known) > len(subscriber.blocks)
    assert 0 == publisher.outcomes["dropped"]


def test_a_full_queue_drops_and_says_so(publish: Any, subscriber: Subscriber) -> None:
    """The engine does not wait; a subscriber then knows fewer blocks than there are, and none that has gone."""
    publisher = publish(max_queue_size=8)
    subscriber.join(publisher)
    for number in range(20_000):
        store(publisher, b"%d" % number)
        if number >= 50:
            publisher.removed(b"%d" % (number - 50))
    subscriber.read_rest()
    store(publisher, b"last")
    subscriber.read_rest()
    assert ["AllBlocksCleared"] in subscriber.events
    assert len(subscriber.blocks) <= 51
    assert len(publisher._hashes) <= 51, "blocks whose end was dropped are not kept for ever"
    assert publisher.outcomes["dropped"] > 10_000


def test_missed_messages_are_sent_again(publish: Any, endpoint: str, tmp_path: Path) -> None:
    """From a number on, with a message that ends them; nonsense is ignored."""
    replay = f"ipc://{tmp_path}/replay"
    publisher = publish(replay_endpoint=replay)
    store(publisher, b"a")
    while not publisher._sent or not publisher.outcomes["sent"]:
        time.sleep(0.001)
    late = Subscriber(endpoint)
    asker = late.context.socket(zmq.DEALER)
    asker.connect(replay)
    asker.send(b"what")
    asker.send_multipart([b"", bytes(8)])
    number = -1
    while True:
        assert asker.poll(_WAIT_MS)
        _, next_number, payload = asker.recv_multipart()
        if not payload:
            break
        number += 1
        assert number == int.from_bytes(next_number, "big")
        late.apply(payload)
    assert bytes([255] * 8) == next_number
    assert (["AllBlocksCleared"], {_PLAIN[0]}) == (late.events[0], late.blocks)
    late.context.destroy(linger=0)


def test_an_address_in_use_is_taken_when_it_is_free(publish: Any) -> None:
    """A process that replaces another serves meanwhile."""
    with zmq.Context() as context, context.socket(zmq.PUB) as holder:
        port = holder.bind_to_random_port("tcp://127.0.0.1")
        publisher = publish(endpoint=f"tcp://*:{port}")
        store(publisher, b"a")
    subscriber = Subscriber(f"tcp://127.0.0.1:{port}")
    subscriber.join(publisher)
    subscriber.context.destroy(linger=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://*:5557", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"endpoint": "*:5557"}', "endpoint must be like"),
        ('{"hwm": 0}', "hwm must be a whole number from 1"),
        ('{"topics": "x"}', "unknown field 'topics'; did you mean 'topic'"),
        ('{"enable_kv_cache_events": false}', "remove kv_events"),
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
    exports, folder = ExportedMetrics(), write_folder(tmp_path / "m", vocab_size=261)
    make_tokenizer(folder / "tokenizer.json")
    backend = LlmBackend(ModelContext(signature, folder, {}, parameters, exports=exports), InstanceContext("m_0"))
    backend.check()
    backend.load()
    number = 0
    while not subscriber.blocks:
        number += 1
        backend.execute(Batch([make_request(text_input=f"{number} is a text of blocks", outputs=("text_output",))]))
        subscriber.read_rest()
    (metric,) = [one for one in exports.collect() if one.name == "weft_llm_kv_events"]
    assert {"sent", "dropped"} == {sample.labels["outcome"] for sample in metric.samples}
    backend.close()
    subscriber.read_until(0)
    with pytest.raises(InvalidArgumentError, match="kv_events needs enable_prefix_caching"):
        read_settings(ModelContext(signature, Path(), {}, parameters | {"enable_prefix_caching": "false"}))
