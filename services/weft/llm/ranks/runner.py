"""``GroupRunner``: runs steps on the ranks of a model, processes that each have a part of it."""

import json
import os
import selectors
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty
from typing import Any

from weft.base.errors import ERROR_BY_CODE, InternalError, UnavailableError, WeftError
from weft.base.observing import logs
from weft.llm.config import EngineConfig
from weft.llm.grammar import GrammarRows
from weft.llm.parallel.topology import Place
from weft.llm.ranks import ends
from weft.llm.ranks.codec import pack, unpack
from weft.llm.ranks.ends import RankEnd, Reception
from weft.llm.runner import RunnerLostError, StepTokens
from weft.llm.scheduler.plan import ForwardPlan, GrammarMasks

_LOG = logs.get_logger("weft.llm.ranks")

#: Time for ranks to end after the engine has, in seconds.
_END_S = 1.0
_CLOSED = "the model was closed before all of its ranks had come"


class GroupRunner:
    """The engine's ``Runner`` over several ranks, which all get the bytes of each plan; one of them sends the tokens.

    A rank that ends, or a step that takes longer than ``rank_timeout_s``, ends all of them: a group is never used
    again, but replaced by a new one.

    Args:
        config: Resolved.
        begin: What every rank is told besides its place, as JSON has it.
        vocab_size: Of the model, for masks of grammars.

    Attributes:
        num_blocks, num_offload_blocks: Of each rank, as many as the one with the fewest has.
        weight_bytes: Of all ranks.
    """

    def __init__(self, config: EngineConfig, begin: Mapping[str, Any], vocab_size: int) -> None:
        self.num_blocks = self.num_offload_blocks = self.weight_bytes = 0
        self._config = config
        self._begin = begin
        self._vocab_size = vocab_size
        self._num_ranks = config.parallel_sizes.num_ranks
        self._reporter = Place(0, config.parallel_sizes.pipeline - 1, 0).rank(config.parallel_sizes)
        self._ranks: list[RankEnd] = []
        self._reception: Reception | None = None
        self._reader = threading.Thread(target=self._read, name="llm-ranks", daemon=True)
        self._on_lost: Callable[[WeftError], None] = lambda error: None
        self._lost: WeftError | None = None
        self._is_closing = False
        self._has_ended = threading.Event()
        self._lock = threading.Lock()

    @property
    def stats(self) -> list[dict[str, float]]:
        """The latest statistics of each rank: ``num_steps``, ``steps_s``, ``rss_bytes``, ``kv_bytes``. Any thread."""
        return [rank.stats for rank in self._ranks]

    def start(self) -> None:
        """Start the ranks, and wait until each has loaded its part.

        Raises:
            UnavailableError: A rank has ended, or ``close`` was called meanwhile.
            WeftError: A rank cannot load its part.
        """
        try:
            self._connect()
            self._reader.start()
            replies = [self._reply(rank) for rank in self._ranks]
        except BaseException:
            self.close()
            raise
        self.num_blocks, self.num_offload_blocks = (
            min(reply[name] for reply in replies) for name in ("num_blocks", "num_offload_blocks")
        )
        self.weight_bytes = sum(reply["weight_bytes"] for reply in replies)
        for rank, reply in zip(self._ranks, replies, strict=True):
            rank.stats = {"num_steps": 0, "steps_s": 0.0, "rss_bytes": 0, "kv_bytes": reply["kv_bytes"]}

    def watch(self, on_lost: Callable[[WeftError], None]) -> None:
        """Have ``on_lost`` called, on any thread, when the group is lost; at once if it is."""
        self._on_lost = on_lost
        if self._lost is not None:
            on_lost(self._lost)

    def bind_thread(self) -> None:
        """See ``Runner``; the ranks compute on threads of their own."""

    def run(self, plan: ForwardPlan) -> StepTokens:
        """See ``Runner``. Raises RunnerLostError."""
        return self.launch(plan)()

    def launch(self, plan: ForwardPlan) -> Callable[[], StepTokens]:
        """See ``Runner``. Raises RunnerLostError, as the returned function does."""
        if isinstance(plan.grammar, GrammarRows):
            plan = plan._replace(grammar=GrammarMasks.of(plan.grammar, self._vocab_size))
        self._send_all(ends.PLAN + pack(plan))
        return self._collect

    def write_adapter(self, slot: int, folder: Path) -> None:
        """Have every rank read its part of an adapter into a slot, beside its steps; one at a time.

        Raises a WeftError.
        """
        self._send_all(ends.ADAPT + json.dumps({"slot": slot, "folder": os.path.abspath(folder)}).encode())
        replies = [self._reply(rank) for rank in self._ranks]
        for reply in replies:
            if "code" in reply:
                raise _error_of(reply)

    def close(self) -> None:
        """End the ranks. Any thread, also while they load; may be called again."""
        with self._lock:
            self._is_closing = True
        if self._reception is not None:
            self._reception.close()
        self._end_all(_END_S)
        if self._reader.ident is not None:
            self._reader.join(_END_S)
        if not self._reader.is_alive():
            for rank in self._ranks:
                rank.close()

    def _connect(self) -> None:
        """Start the ranks of this machine, wait for the others, and tell all of them what they are."""
        config, timeout_s = self._config, self._config.rank_timeout_s
        host, environment = "127.0.0.1", {"OMP_NUM_THREADS": str(config.num_threads)}
        if config.num_remote_ranks:
            with self._lock:  # ``close`` either finds it, or comes first
                if self._is_closing:
                    raise UnavailableError(_CLOSED)
                key_file = Path(self._begin["directory"], config.rank_key_file)
                self._reception = Reception(config.rank_listen_address, key_file)
            host, _ = ends.split_address(config.rank_listen_address)
        elif os.path.isdir("/sys/class/net/lo"):
            environment["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else reaches them
        device = int(config.device.partition(":")[2] or 0)
        with ends.listen(host, 0) as store:
            address, port = store.getsockname()[:2]
            own = {"store": store.fileno(), "host": address, "port": port}
            told = {**self._begin, "log": logs.settings(), **own}
            for number in range(self._num_ranks - config.num_remote_ranks):
                descriptors = [] if number else [store.fileno()]
                self._add(RankEnd.child(number, timeout_s, device + number, environment, descriptors))
        for number in range(len(self._ranks), self._num_ranks):
            _LOG.info("waiting at %s for rank %d of %d", config.rank_listen_address, number, self._num_ranks)
            try:
                self._add(self._reception.accept(number, timeout_s))  # type: ignore[union-attr]  # there are some
            except OSError:
                raise UnavailableError(_CLOSED) from None
        if self._reception is not None:
            self._reception.close()  # others wait for the next group
        for rank in self._ranks:
            told |= {"rank": rank.number, "answers": rank.number == self._reporter}
            self._send(rank, json.dumps(told).encode())

    def _add(self, rank: RankEnd) -> None:
        with self._lock:
            self._ranks.append(rank)
            if self._is_closing:
                rank.end()

    def _collect(self) -> StepTokens:
        """The tokens of the oldest step in flight, from the rank that sends them."""
        try:
            data = self._ranks[self._reporter].results.get(timeout=self._config.rank_timeout_s)
        except Empty:
            data = None
            self._lose(f"a step took longer than rank_timeout_s = {self._config.rank_timeout_s:g} s")
        if data is None:
            raise self._error()
        try:
            return unpack(data)  # type: ignore[no-any-return]  # what the rank has packed
        except ValueError as error:
            self._lose(f"rank {self._reporter} sent {error}")
            raise self._error() from None

    def _send(self, rank: RankEnd, message: bytes) -> None:
        try:
            rank.send(message)
        except OSError as error:
            if not isinstance(error, ConnectionError):
                self._lose(f"rank {rank.number} takes no messages: {error}")
            raise self._error() from None

    def _send_all(self, message: bytes) -> None:
        for rank in self._ranks:
            self._send(rank, message)

    def _reply(self, rank: RankEnd) -> dict[str, Any]:
        """The next reply of a rank. Raises RunnerLostError, or why a rank could not load."""
        message = rank.replies.get()
        if message is None:
            rank.replies.put(None)
            raise self._error()
        return json.loads(message[1:])  # type: ignore[no-any-return]  # what the rank has sent

    def _error(self) -> WeftError:
        self._has_ended.wait(_END_S)  # a connection may break before the reader has seen who was lost
        return self._lost or RunnerLostError("the ranks of the model have ended")

    def _lose(self, reason: str, failure: WeftError | None = None) -> None:
        """End the group, once; whoever waits for a rank is woken, and gets ``failure`` or that it is lost."""
        loss = failure or RunnerLostError(f"the ranks of the model were lost, and are started again: {reason}")
        with self._lock:
            if self._is_closing or self._lost is not None:
                return
            self._lost = loss
        self._end_all(0.0)
        self._has_ended.set()
        self._on_lost(loss)

    def _end_all(self, grace_s: float) -> None:
        for rank in self._ranks:
            rank.hang_up()
        for rank in self._ranks:
            rank.end(grace_s)

    def _read(self) -> None:
        """Pass on what the ranks send, until all have ended."""
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.connection.fileno(), selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._take(key.data):
                        selector.unregister(key.fd)
        self._has_ended.set()

    def _take(self, rank: RankEnd) -> bool:
        """Pass on the next message of a rank; False: it has ended."""
        try:
            message = rank.connection.recv_bytes(ends.MAX_BYTES)
        except (EOFError, OSError):
            if not self._is_closing and self._lost is None:
                self._lose(rank.describe_end())
            rank.replies.put(None)
            rank.results.put(None)
            return False
        kind = message[:1]
        if kind == ends.TOKENS:
            rank.results.put(memoryview(message)[1:])
        elif kind == ends.STATS:
            rank.stats = rank.stats | json.loads(message[1:])
        elif kind == ends.FAILED:
            self._lose("", _error_of(json.loads(message[1:])))
        else:
            rank.replies.put(message)
        return True


def _error_of(fields: Mapping[str, str]) -> WeftError:
    return ERROR_BY_CODE.get(fields["code"], InternalError)(fields["message"])
