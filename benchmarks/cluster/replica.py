"""An engine in virtual time: continuous batching, prompts in chunks or whole, KV memory, prefix cache."""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from math import ceil, log, sqrt

from benchmarks.cluster.costs import StepCosts
from benchmarks.cluster.requests import Request
from benchmarks.simulator import Clock

_NS = 1e9
#: Times between tokens are counted by classes of 2 %.
_CLASSES = 50.0


class PrefixCache:
    """Names of blocks, the longest unused of which makes room; the end of a chain goes before its beginning."""

    def __init__(self, num_tokens: int) -> None:
        self._blocks: dict[int, None] = {}
        self._num_tokens = num_tokens

    def match(self, blocks: Iterable[int]) -> int:
        """Number of blocks at the beginning of the chain that are there."""
        found = 0
        for block in blocks:
            if block not in self._blocks:
                break
            found += 1
        return found

    def add(self, blocks: tuple[int, ...], block_tokens: int) -> None:
        """The blocks are there, as the last ones used; all blocks of a cache are of one size."""
        for block in reversed(blocks):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) * block_tokens > self._num_tokens:
            del self._blocks[next(iter(self._blocks))]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How replicas batch.

    Attributes:
        chunk_tokens: Of a step, prompts' chunks and decoding sequences together.
        mixes: Prompts and decoding sequences share steps; otherwise prompts go first, in steps of their own.
        max_num_seqs: That decode at a time.
        has_cache: Beginnings of prompts are kept, and not computed again.
        max_steps: Steps of decoding that one event may stand for; 1 is slow, and gives the same figures.
    """

    chunk_tokens: int = 2048
    mixes: bool = True
    max_num_seqs: int = 256
    has_cache: bool = True
    max_steps: int = 1 << 30


@dataclass(slots=True)
class Progress:
    """A prompt of which a part is computed; the cache is asked when its first part is."""

    request: Request
    num_done: int = 0


@dataclass(slots=True)
class Work:
    """What a replica does now: so many equal steps of decoding, or one with parts of prompts."""

    begin_ns: int
    num_steps: int
    decodes: bool
    first_s: float
    more_s: float = 0.0
    chunks: list[tuple[Progress, int]] = field(default_factory=list)

    def seconds(self, num_steps: int) -> float:
        """Of the first steps: each takes ``more_s`` longer than the one before."""
        return num_steps * self.first_s + self.more_s * num_steps * (num_steps - 1) / 2

    def steps_until(self, seconds: float) -> int:
        """Steps that end at that time or later."""
        half = self.more_s / 2
        linear = self.first_s - half
        root = (sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half) if half else seconds / self.first_s
        return min(max(ceil(root - 1e-6), 1), self.num_steps)


class Replica:
    """One engine with its queue.

    Attributes:
        busy_ns: Time in steps.
        num_steps, num_decoded: Steps, and tokens that they decoded.
        gaps: Tokens by class of the time since the one before.
        num_tokens: Held in KV memory by admitted requests, to the end of their answers.
        on_prompt: Called when a prompt is computed, instead of decoding it here; None: it is decoded here.
        on_end: Called with each request whose answer is complete.
    """

    def __init__(
        self,
        clock: Clock,
        costs: StepCosts,
        settings: EngineSettings,
        on_end: Callable[[Request], None],
        on_prompt: "Callable[[Replica, Request], None] | None" = None,
        cache: PrefixCache | None = None,
    ) -> None:
        self.busy_ns = self.num_steps = self.num_decoded = self.num_tokens = 0
        self.gaps: Counter[int] = Counter()
        self.waiting: deque[Request] = deque()
        self.link_free_ns = 0
        self.costs = costs
        self._clock, self._settings = clock, settings
        self._on_end, self.on_prompt = on_end, on_prompt
        self.cache = cache or PrefixCache(costs.num_kv_tokens if settings.has_cache else 0)
        self._prompts: list[Progress] = []
        self._running: list[tuple[int, int, Request]] = []
        self._context = 0
        self._order = count()
        self._work: Work | None = None
        self._version = 0

    @property
    def num_queued(self) -> int:
        """Tokens of prompts that are to be computed, as if nothing were cached."""
        return sum(one.num_prompt for one in self.waiting) + sum(
            p.request.num_prompt - p.num_done for p in self._prompts
        )

    def submit(self, request: Request) -> None:
        """A request arrives; one with ``first_s`` has its prompt's keys and values with it."""
        self.waiting.append(request)
        if self._work is None:
            self._begin()
        elif not self._work.chunks:
            work, now_ns = self._work, self._clock.now_ns
            num_steps = work.steps_until((now_ns - work.begin_ns) / _NS)
            if num_steps < work.num_steps:  # it may begin with the next step
                work.num_steps = num_steps
                self._end_at(work)

    def release(self, request: Request) -> None:
        """The keys and values of a prompt that went elsewhere make room."""
        self.num_tokens -= request.num_prompt
        if self._work is None:
            self._begin()

    def num_cached(self, request: Request) -> int:
        """Tokens of the prompt whose keys and values are there; the last token is always computed."""
        size = request.block_tokens
        return min(self.cache.match(request.blocks[: request.num_prompt // size]) * size, request.num_prompt - 1)

    def _admit(self) -> None:
        """First come, first served: whoever has a seat and room for prompt and answer."""
        while self.waiting and len(self._running) + len(self._prompts) < self._settings.max_num_seqs:
            request = self.waiting[0]
            needed = request.num_prompt + (0 if self.on_prompt else request.num_output)
            if self.num_tokens and self.num_tokens + needed > self.costs.num_kv_tokens:
                return
            self.waiting.popleft()
            self.num_tokens += needed
            if request.first_s:
                self._decode(request)
            else:
                self._prompts.append(Progress(request))

    def _begin(self) -> None:
        self._admit()
        now_ns, num_running = self._clock.now_ns, len(self._running)
        if self._prompts:
            decodes = self._settings.mixes and num_running > 0
            room = self._settings.chunk_tokens - (num_running if decodes else 0)
            chunks, num_new, attended = [], 0, 0.0
            for prompt in self._prompts:
                if not prompt.num_done:
                    prompt.num_done = prompt.request.num_cached = self.num_cached(prompt.request)
                size = min(prompt.request.num_prompt - prompt.num_done, room - num_new)
                if not self._settings.mixes:  # whole prompts, one at least
                    whole = prompt.request.num_prompt - prompt.num_done
                    size = whole if not chunks or num_new + whole <= room else 0
                if size <= 0:
                    break
                chunks.append((prompt, size))
                num_new += size
                attended += size * (prompt.num_done + size / 2)
            context = self._context if decodes else 0
            seconds = self.costs.step_s(num_new + (num_running if decodes else 0), context, attended)
            self._work = Work(now_ns, 1, decodes, seconds, chunks=chunks)
        elif self._running:
            num_steps = min(self._running[0][0] - self.num_steps, self._settings.max_steps)
            seconds = self.costs.step_s(num_running, self._context)
            self._work = Work(now_ns, num_steps, True, seconds, self.costs.kv_s * num_running)
        else:
            self._work = None
            return
        self._end_at(self._work)

    def _end_at(self, work: Work) -> None:
        self._version += 1
        version = self._version
        end_ns = work.begin_ns + round(work.seconds(work.num_steps) * _NS)
        self._clock.at(max(end_ns, self._clock.now_ns), lambda: self._end(version))

    def _end(self, version: int) -> None:
        work = self._work
        if version != self._version or work is None:
            return
        now_ns, num_running = self._clock.now_ns, len(self._running)
        self.busy_ns += now_ns - work.begin_ns
        if num_running:
            step_s = (now_ns - work.begin_ns) / _NS / work.num_steps
            if work.decodes:
                self.num_steps += work.num_steps
                self.num_decoded += work.num_steps * num_running
                self._context += work.num_steps * num_running
                self.gaps[int(log(step_s) * _CLASSES)] += work.num_steps * num_running
            else:
                self.gaps[int(log(step_s) * _CLASSES)] += num_running  # they waited
        while self._running and self._running[0][0] <= self.num_steps:
            _, _, request = heapq.heappop(self._running)
            self._context -= request.num_prompt + request.num_output
            self.num_tokens -= request.num_prompt + request.num_output
            self._complete(request)
        for prompt, size in work.chunks:
            prompt.num_done += size
            if prompt.num_done == prompt.request.num_prompt:
                self._prompts.remove(prompt)
                self._computed(prompt.request)
        self._begin()

    def _computed(self, request: Request) -> None:
        """The first token of the answer is there."""
        request.first_s = self._clock.now_ns / _NS
        self.cache.add(request.blocks[: request.num_prompt // request.block_tokens], request.block_tokens)
        if self.on_prompt:
            self.on_prompt(self, request)
        elif request.num_output == 1:
            self.num_tokens -= request.num_prompt + 1
            self._complete(request)
        else:
            self._decode(request)

    def _decode(self, request: Request) -> None:
        self._context += request.num_prompt + 1
        heapq.heappush(self._running, (self.num_steps + request.num_output - 1, next(self._order), request))

    def _complete(self, request: Request) -> None:
        request.end_s = self._clock.now_ns / _NS
        self.cache.add(request.blocks, request.block_tokens)
        self._on_end(request)
