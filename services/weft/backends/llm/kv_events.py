"""vLLM's KV events: tells routers of others, over ZeroMQ, which blocks the prefix cache has.

Messages, block hashes and replay are those of ``vllm/distributed/kv_events.py`` and ``vllm/v1/core/kv_cache_utils.py``
(hash ``sha256_cbor``, integers of 64 bits, events as arrays), as llm-d and Dynamo read them.
"""

import json
import os
import re
import threading
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

from weft.base.observing.logs import get_logger
from weft.base.text.suggestion import suggestion
from weft.llm.request import EngineRequest
from weft.serving.backends.loading import require

_LOG = get_logger("weft.model.llm")
#: The extra of Weft that is needed, and what it installs.
EXTRA, PACKAGES = "kv-events", ("zmq", "cbor2", "msgpack")
_ENDPOINT = re.compile(r"(tcp|ipc)://\S+")
#: Fields of vLLM's configuration that say what holds here anyway.
_GIVEN = {"enable_kv_cache_events": True, "publisher": "zmq"}
_MEDIUM = "GPU"  # vLLM's word for its first tier on every platform
_MOST = 2**24
#: Time that events are collected for one message, how often replay is looked at, and until an address is tried again.
_COLLECT_S, _WAIT_S, _RETRY_S = 0.002, 0.1, 1.0
_MAX_EVENTS = 4096
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_CLEARED = None


@dataclass(frozen=True)
class KvEventsConfig:
    """Where and how to publish; names and defaults are those of vLLM's ``--kv-events-config``.

    Attributes:
        endpoint: Bound if it has a ``*`` or ``::`` or is ``ipc://``, else connected to.
        replay_endpoint: Bound, for subscribers that missed messages; "": none.
        buffer_steps: Messages kept for replay.
        hwm: Messages that wait for a slow subscriber; it misses more.
        max_queue_size: Blocks that wait to be published; more are dropped.
        hash_seed: ``PYTHONHASHSEED`` of the engines whose hashes are to be the same; "": random.

    Raises:
        ValueError: A field is unknown or has a wrong value.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str = ""
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    hash_seed: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, default = getattr(self, field.name), field.default
            is_text = isinstance(default, str)
            if not (isinstance(value, str) if is_text else type(value) is int and 1 <= value <= _MOST):
                allowed = "a text" if is_text else f"a whole number from 1 to {_MOST}"
                raise ValueError(f"{field.name} must be {allowed}, got {value!r:.80}")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if not _ENDPOINT.fullmatch(value) and (value or name == "endpoint"):
                raise ValueError(f"{name} must be like tcp://*:5557 or ipc:///run/kv.sock, got {value!r:.80}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a JSON object. Raises ValueError."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise ValueError(f'it must be a JSON object such as {{}} or {{"topic": "kv@HOST@MODEL"}}, got {text!r:.80}')
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name in _GIVEN and value != _GIVEN[name]:
                raise ValueError(
                    f"{name} must be {_GIVEN[name]!r}, got {value!r:.80}; to publish nothing remove kv_events"
                )
            if name not in (*known, *_GIVEN):
                raise ValueError(f"unknown field '{name:.80}'{suggestion(name, known)}")
        return cls(**{name: value for name, value in given.items() if name in known and value is not None})


class _Stored(NamedTuple):
    block_hash: bytes
    parent: bytes | None
    tokens: "array[int]"
    lora_name: str
    salt: bytes


class KvEventPublisher:
    """Publishes the events of one engine's blocks from a thread of its own; a ``BlockObserver``.

    The engine's thread only appends to a queue. When that is full, events are dropped until half of it is published;
    then subscribers are told that all blocks were cleared, so that they never believe in a block that is gone.

    Attributes:
        outcomes: Number of events (one for each block) that were ``sent`` and ``dropped``.
    """

    def __init__(self, config: KvEventsConfig, block_size: int, num_blocks: int) -> None:
        self._zmq, self._cbor2, self._msgpack = (require(name, EXTRA) for name in PACKAGES)
        self._config = config
        self._block_size = block_size
        self.outcomes = Counter(sent=0, dropped=0)
        self._inbox: SimpleQueue[_Stored | bytes | None] = SimpleQueue()
        self._inbox.put(_CLEARED)  # a new engine has no blocks
        self._is_full = False
        self._root = self._hash(config.hash_seed) if config.hash_seed else os.urandom(32)
        #: vLLM's hashes, by ours: of blocks in the cache, and of the last ones that left it, which may be parents yet.
        self._hashes: dict[bytes, bytes] = {}
        self._old: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_old = num_blocks
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)  # number and payload
        self._num_messages = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def stored(self, request: EngineRequest, hashes: Sequence[bytes], tokens: "array[int]", index: int) -> None:
        """See ``BlockObserver``."""
        size = self._block_size
        own = tokens[index * size : (index + 1) * size]
        self._put(
            _Stored(hashes[index], hashes[index - 1] if index else None, own, request.params.lora_name, request.salt)
        )

    def removed(self, block_hash: bytes) -> None:
        """See ``BlockObserver``."""
        self._put(block_hash)

    def close(self) -> None:
        """Tell subscribers that all blocks are gone, and end the thread."""
        self._inbox.put(_CLEARED)
        self._is_closed.set()
        self._thread.join()

    def _put(self, event: _Stored | bytes) -> None:
        num_waiting, most = self._inbox.qsize(), self._config.max_queue_size
        if num_waiting >= (most // 2 if self._is_full else most):
            self._is_full = True
            self.outcomes["dropped"] += 1
            return
        if self._is_full:
            self._is_full = False
            self._inbox.put(_CLEARED)
        self._inbox.put(event)

    def _run(self) -> None:
        zmq, config = self._zmq, self._config
        with zmq.Context() as context:
            context.linger = 0
            publisher, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
            publisher.set_hwm(config.hwm)
            replay.set_hwm(config.buffer_steps + 1)  # what is above is dropped
            is_bound = any(part in config.endpoint for part in ("*", "::", "ipc://"))
            waiting = [(publisher.bind if is_bound else publisher.connect, config.endpoint)]
            waiting += [(replay.bind, config.replay_endpoint)] if config.replay_endpoint else []
            retry_s = 0.0
            while not (self._is_closed.is_set() and self._inbox.empty()):
                if waiting and time.monotonic() >= retry_s:
                    waiting = [(attach, address) for attach, address in waiting if not self._attached(attach, address)]
                    retry_s = time.monotonic() + _RETRY_S
                if replay.poll(0):
                    self._replay(replay)
                if events := self._events(self._collected()):
                    payload = self._msgpack.packb([time.time(), events, 0])
                    number = self._num_messages.to_bytes(8, "big")
                    publisher.send_multipart((config.topic.encode(), number, payload))
                    self._sent.append((number, payload))
                    self._num_messages += 1
            for socket in (publisher, replay):
                socket.close(linger=round(1e3 * _WAIT_S))

    def _attached(self, attach: Any, address: str) -> bool:
        """Whether the address could be bound, or connected to; else it is tried again: a process may leave it."""
        try:
            attach(address)
        except self._zmq.ZMQError as error:
            _LOG.warning("kv_events: cannot listen on %s yet: %s", address, error)
            return False
        return True

    def _collected(self) -> list[_Stored | bytes | None]:
        try:
            events = [self._inbox.get(timeout=_WAIT_S)]
        except Empty:
            return []
        time.sleep(_COLLECT_S)
        while len(events) < _MAX_EVENTS and not self._inbox.empty():
            events.append(self._inbox.get())
        return events

    def _replay(self, socket: Any) -> None:
        client, *rest = socket.recv_multipart()
        if len(rest) == 2 and len(rest[1]) == 8:
            for number, payload in (*(one for one in self._sent if one[0] >= rest[1]), (_END_OF_REPLAY, b"")):
                socket.send_multipart((client, b"", number, payload))

    def _events(self, items: Sequence[_Stored | bytes | None]) -> list[list[Any]]:
        """Events as vLLM encodes them, one for successive blocks of a sequence."""
        events: list[list[Any]] = []
        last: bytes | None = None  # the last block of the last event, if it can be continued
        for item in items:
            if item is _CLEARED:
                events.append(["AllBlocksCleared"])
                last = None
                self._forget(self._hashes)
                self._hashes = {}
            elif isinstance(item, bytes):
                last = None
                self._remove(item, events)
            else:
                last = self._store(item, events, last)
        return events

    def _remove(self, block_hash: bytes, events: list[list[Any]]) -> None:
        known = self._hashes.pop(block_hash, None)
        if known is None:
            return
        self._forget({block_hash: known})
        if not events or events[-1][0] != "BlockRemoved":
            events.append(["BlockRemoved", [], _MEDIUM])
        events[-1][1].append(_number(known))
        self.outcomes["sent"] += 1

    def _forget(self, hashes: dict[bytes, bytes]) -> None:
        self._old.update(hashes)
        while len(self._old) > self._num_old:
            self._old.popitem(last=False)

    def _store(self, item: _Stored, events: list[list[Any]], last: bytes | None) -> bytes | None:
        parent = self._root if item.parent is None else self._hashes.get(item.parent) or self._old.get(item.parent)
        if parent is None:  # dropped before
            self.outcomes["dropped"] += 1
            return None
        salt = item.salt.decode(errors="replace") if item.parent is None else ""
        extra = tuple(filter(None, (item.lora_name, salt))) or None
        tokens = item.tokens.tolist()
        own = self._hashes[item.block_hash] = self._hash((parent, tokens, extra))
        if last is None or last != item.parent:
            before = None if item.parent is None else _number(parent)
            name = item.lora_name or None
            events.append(["BlockStored", [], before, [], self._block_size, None, _MEDIUM, name, []])
        event = events[-1]
        event[1].append(_number(own))
        event[3] += tokens
        event[8].append(extra)
        self.outcomes["sent"] += 1
        return item.block_hash

    def _hash(self, value: Any) -> bytes:
        return sha256(self._cbor2.dumps(value, canonical=True)).digest()


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")
