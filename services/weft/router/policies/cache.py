"""The policy ``cache``: keeps a step's answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

from typing_extensions import override

from weft.base.caching import (
    CachedResponse,
    CoalescedTimeoutError,
    CoalescingCache,
    cache_key,
    cache_key_base,
)
from weft.base.errors import WeftError
from weft.language.description import condition_text
from weft.language.plan import Condition
from weft.language.syntax.file import GivenPolicies, GraphFile, GraphReport, PolicyKind
from weft.router.reporting.path import StepRecord
from weft.router.steps.action import Action, PolicyAction, PolicyParts, StepPolicyPlan
from weft.router.steps.run import Run
from weft_protos import graph_pb2 as pb

_DEFAULT_MIB = 64


@dataclass(frozen=True, slots=True)
class CachePlan(StepPolicyPlan):
    """Settings of a cache.

    Attributes:
        ttl_ms: Time to live; 0 means until evicted.
        max_bytes: Keys and answers together; the least recently used go first.
        key: Distinguishes requests, besides target, version, inputs and outputs.
        stale_if_error_ms: How long after its time to live an answer may replace an UNAVAILABLE call; 0: not at all.
    """

    field: ClassVar[str] = "cache"
    condition_words: ClassVar[str] = "cache key"

    ttl_ms: int
    max_bytes: int
    key: Condition | None = None
    stale_if_error_ms: int = 0

    @property
    @override
    def condition(self) -> Condition | None:
        return self.key

    def text(self) -> str:
        """For example ``cache 60000 ms, 64 MiB``, with the key if there is one."""
        lifetime = f"{self.ttl_ms} ms" if self.ttl_ms else "until evicted"
        key = f", key {condition_text(self.key)}" if self.key is not None else ""
        stale = f", {self.stale_if_error_ms} ms longer while unavailable" if self.stale_if_error_ms else ""
        return f"cache {lifetime}{stale}, {self.max_bytes / (1 << 20):g} MiB{key}"

    @override
    def wrap(self, action: Action, parts: PolicyParts) -> Action:
        return Cached(action, self, parts)


class CachePolicy(PolicyKind):
    """``cache`` in graph files: of one step, or of the whole answers of a graph."""

    field = CachePlan.field
    why_no_stream = "only single responses can be kept"
    condition_field = "key"
    counters = (
        ("cache_hits", "Answers that were there, or on their way to an equal request"),
        ("cache_misses", "Answers that were not in the cache"),
        ("stale_answers", "Expired answers, given because the call was UNAVAILABLE"),
    )

    @override
    def where_instead(self, *, is_root: bool) -> str:
        return f"{'the graph' if is_root else 'the steps'}, where answers are kept"

    @override
    def plan(self, given: GivenPolicies, condition: Condition | None) -> CachePlan | None:
        return _plan(given.own.cache, condition) if given.own.HasField("cache") else None

    @override
    def plan_of_graph(self, message: pb.Graph, condition: Condition | None) -> CachePlan | None:
        """``response_cache`` is a cache with the defaults."""
        if not (message.policy.HasField("cache") or message.response_cache.enable):
            return None
        return _plan(message.policy.cache, condition)

    @override
    def check(
        self, file: GraphFile, policy: pb.Policy, path: str, around: Sequence[pb.Policy], report: GraphReport
    ) -> None:
        if policy.cache.stale_if_error_ms and not policy.cache.ttl_ms:
            text = "'stale_if_error_ms' has no effect without 'ttl_ms': an answer that never expires is not stale"
            report.error("G018", file, f"{path}.stale_if_error_ms", text, is_name=True)


def _plan(cache: pb.Cache, key: Condition | None) -> CachePlan:
    return CachePlan(cache.ttl_ms, (cache.max_mib or _DEFAULT_MIB) << 20, key, cache.stale_if_error_ms)


class Cached(PolicyAction):
    """Runs the action only for requests without a cached or pending answer; errors are not kept.

    If the plan allows it, an expired answer replaces an UNAVAILABLE one.

    Requests are equal if their inputs and the value of the plan's key condition are; other headers and parameters do
    not count.
    """

    def __init__(self, action: Action, plan: CachePlan, parts: PolicyParts) -> None:
        super().__init__(action)
        step, runtime = parts.step, parts.runtime
        self._path = step.path
        self._inputs = step.inputs
        self._output_names = [name for name, _ in step.outputs]
        self._base = self._base_with(())
        self._output_slots = [slot for _, slot in step.outputs]
        self._condition = plan.key
        self._error_context = parts.error_context
        self._answers = CoalescingCache(
            runtime.share(plan.max_bytes), plan.ttl_ms, runtime.clock_ns, plan.stale_if_error_ms
        )
        self._counters = parts.counters

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        frame, request = run.frame, run.request
        if request.is_in_sequence:  # a model that remembers requests must get each of them
            await self._action.act(run, record)
            return
        extra = ""
        if self._condition is not None:
            extra = self._error_context.text(self._condition, run, f"{self._path}: cache key")
        captured = () if request.captures is None else self._captured_within(request.captures)
        base = self._base_with(captured) if captured else self._base
        key = cache_key(base, [(name, frame[slot]) for name, slot in self._inputs], extra)
        record.cached = False
        try:
            answer, record.cached = await self._answers.answer(
                key, lambda: self._make(run, record, captured), run.deadline_ns
            )
        except CoalescedTimeoutError as error:
            raise self._error_context.wrap(error, self.where) from error
        except WeftError as error:
            stale = self._answers.stale_on_unavailable(error, key)
            if stale is None:
                raise
            answer, record.cached, record.is_stale = stale, True, True
            record.error = error.message
            self._counters.events["stale_answers"] += 1
        if record.cached:
            self._counters.events["cache_hits"] += 1
        else:
            self._counters.events["cache_misses"] += 1
        num_outputs = len(self._output_slots)
        for slot, tensor in zip(self._output_slots, answer.outputs[:num_outputs], strict=True):
            frame[slot] = tensor
        for name, tensor in zip(captured, answer.outputs[num_outputs:], strict=True):
            if tensor is not None:
                request.captured[name] = tensor
        if answer.version:
            record.version = answer.version
        if answer.parameters:
            request.response_parameters.update(answer.parameters)

    def _base_with(self, captured: Sequence[str]) -> blake2b:
        return cache_key_base((self.target, self.model, self.version), (*self._output_names, *captured))

    def _captured_within(self, captures: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        own, within = self._path, f"{self._path}/"
        return tuple(
            sorted(
                f"{path}/{name}"
                for path, names in captures.items()
                if path == own or path.startswith(within)
                for name in names
            )
        )

    async def _make(self, run: Run, record: StepRecord, captured: Sequence[str]) -> CachedResponse:
        own = run.fork()
        await self._action.act(own, record)
        outputs = (*(own.frame[slot] for slot in self._output_slots), *map(own.request.captured.get, captured))
        return CachedResponse(outputs, own.request.response_parameters, record.version)
