"""``response_cache { enable: true }``: caches answers and executes equal requests once."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from weft.base.caching import CachedResponse, CoalescingCache, cache_key, cache_key_base
from weft.base.core import CallContext, InferCall, InferResult
from weft.base.observing import telemetry
from weft.base.statistics import MAX_COUNTED_LEVEL, LatencyHistogram
from weft.serving.lifecycle.warm_pool import OnDemandModel
from weft.serving.runtime.idle import CrashedInstances
from weft.serving.runtime.model import ServedModel
from weft.v2.protocol.status import CACHE_HIT

#: Parameters that do not change the answer.
_SCHEDULING = frozenset({"priority", "timeout"})
#: Larger inputs are hashed on a thread: 1 MB takes 1 ms.
_MANY_BYTES = 1 << 18


class CachedModel:
    """Answers equal requests of a model, which is not decoupled, from the cache ``answers`` of all models.

    Requests are equal if version, inputs (with datatype and shape), requested outputs in any order and parameters,
    except priority and timeout, are; those that arrive together are executed once. Errors are not cached. A new load of
    the model starts with an empty cache. A hit counts at the level that ``level_of`` gives its priority.
    """

    def __init__(
        self, served: ServedModel | OnDemandModel, answers: CoalescingCache, level_of: Callable[[int], int]
    ) -> None:
        self.signature = signature = served.signature
        self.statistics = served.statistics
        self._served = served
        self._answers = answers
        self._level_of = level_of
        self._input_names = [spec.name for spec in signature.inputs]
        self._output_names = tuple(spec.name for spec in signature.outputs)
        self._identity = (signature.name, signature.version, f"{id(self)}")  # answers of two loads may differ

    async def start(self) -> None:
        """As of the model."""
        await self._served.start()

    async def stop(self, *, grace_s: float) -> None:
        """As of the model."""
        await self._served.stop(grace_s=grace_s)

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As of the model; one that waits for an equal request ends at its deadline, and may be cancelled alone."""
        start_ns = time.monotonic_ns()
        if sum(len(tensor.data) for tensor in call.inputs.values()) > _MANY_BYTES:
            key = await asyncio.to_thread(self._key, call)
        else:
            key = self._key(call)
        looked_ns = time.monotonic_ns()
        names = self._names(call)

        async def execute() -> CachedResponse:
            result = await self._served.infer(call, context)
            return CachedResponse(tuple(map(result.outputs.get, sorted(names))), result.parameters)

        answer, is_cached = await self._answers.answer(key, execute, context.deadline_ns)
        if is_cached:
            self._count_hit(call, context, start_ns)
            context.trailing_metadata.append(CACHE_HIT)
        else:
            self.statistics.cache_miss.add(looked_ns - start_ns)
        found = dict(zip(sorted(names), answer.outputs, strict=True))
        outputs = {name: tensor for name in names if (tensor := found[name]) is not None}
        signature = self.signature
        result = InferResult(signature.name, signature.version, call.request_id, answer.parameters, outputs)
        result.is_cached = is_cached
        return result

    @property
    def crashed(self) -> CrashedInstances:
        """As of the model."""
        return self._served.crashed

    def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As of the model: responses of decoupled models are not cached."""
        return self._served.stream(call, context)

    def _names(self, call: InferCall) -> tuple[str, ...]:
        return tuple(dict.fromkeys(output.name for output in call.outputs)) or self._output_names

    def _key(self, call: InferCall) -> bytes:
        known = [(name, call.inputs.get(name)) for name in self._input_names]
        others = sorted(call.inputs.keys() - set(self._input_names))  # of a request that will be refused
        parameters = sorted((key, value) for key, value in call.parameters.items() if key not in _SCHEDULING)
        base = cache_key_base(self._identity, sorted(self._names(call)))
        return cache_key(base, known, repr((parameters, others)))

    def _count_hit(self, call: InferCall, context: CallContext, start_ns: int) -> None:
        """Count a success without an execution, as Triton Inference Server does."""
        now_ns = time.monotonic_ns()
        statistics = self.statistics
        statistics.success.add(now_ns - context.arrival_ns)
        statistics.cache_hit.add(now_ns - start_ns)
        priority = call.parameters.get("priority", 0)
        level = min(self._level_of(priority), MAX_COUNTED_LEVEL) if isinstance(priority, int) else 0
        histogram = statistics.request_latency.setdefault(level, LatencyHistogram())
        trace_id = telemetry.trace_id_of(context.trace_context)
        histogram.observe((now_ns - context.arrival_ns) / 1e9, trace_id=trace_id, unix_time_s=time.time())
