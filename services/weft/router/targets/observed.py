"""A target whose calls are counted, and whose loss is noticed with the first call that fails."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import WeftError
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics, failure_reason
from weft.router.reporting.counters import count_answer
from weft.router.target import RetryBudget, Target, TargetModel

ModelVersion = tuple[str, str]


class ObservedTarget(Target):
    """Passes everything to another target and keeps counters per model version, as seen from here.

    Each call counts as one request and one execution, or one hit of the model's response cache. Its whole duration is
    ``compute_infer``; what the other side waits in its queues shows in the other side's own statistics, so ``queue``
    counts calls and no time.

    Args:
        target: Answers.
        statistics: Receives the counters by (model, version); shared by the targets of a router. None: the target keeps
            counters itself.
        on_unavailable: Called with the target's name when an answer is UNAVAILABLE.
        signature_of: What is known of a model by name and version ("" = default); None for an unknown one.
        budget: Calls that no policy of a graph repeats earn a part of a repeat here.

    Attributes:
        num_unavailable: Calls that ended UNAVAILABLE, and requests that ``TargetCatalog.count_missed`` adds.
    """

    def __init__(
        self,
        target: Target,
        statistics: dict[ModelVersion, ModelStatistics] | None,
        on_unavailable: Callable[[str], None],
        signature_of: Callable[[str, str], ModelSignature | None],
        budget: RetryBudget,
    ) -> None:
        self.name = target.name
        self.address = target.address
        self._target = target
        self._statistics = statistics
        self._on_unavailable = on_unavailable
        self._signature_of = signature_of
        self._budget = budget
        self.num_unavailable = 0

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        start_ns = time.monotonic_ns()
        if context.tried is None:
            self._budget.earn()
        try:
            result = await self._target.infer(call, context)
        except (WeftError, asyncio.CancelledError) as error:
            self._failed(call, error, start_ns)
            raise
        if self._statistics is not None:
            self._answered(self._statistics, call, context, result.model_version, start_ns, is_cached=result.is_cached)
        return result

    @override
    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``Target.stream_infer``; a stream is one request, which lasts until its end."""
        start_ns = time.monotonic_ns()
        if context.tried is None:
            self._budget.earn()
        version = ""
        try:
            async with contextlib.aclosing(self._target.stream_infer(call, context)) as results:
                async for result in results:
                    version = result.model_version
                    yield result
        except (WeftError, asyncio.CancelledError, GeneratorExit) as error:
            self._failed(call, error, start_ns)
            raise
        if self._statistics is not None:
            self._answered(self._statistics, call, context, version, start_ns)

    @override
    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        return await self._target.discover(timeout_s=timeout_s)

    @override
    async def close(self) -> None:
        await self._target.close()

    def _answered(
        self,
        statistics: dict[ModelVersion, ModelStatistics],
        call: InferCall,
        context: CallContext,
        version: str,
        start_ns: int,
        *,
        is_cached: bool = False,
    ) -> None:
        counters = statistics.get((call.model_name, version)) or _counters_of(statistics, call, version)
        count_answer(
            counters,
            context,
            num_rows=call.num_rows,
            arrival_ns=start_ns,
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
            is_cached=is_cached,
        )

    def _failed(self, call: InferCall, error: BaseException, start_ns: int) -> None:
        reason = "CANCELED"
        if isinstance(error, WeftError):
            reason = failure_reason(error.code)
            if error.code == "UNAVAILABLE":
                self.num_unavailable += 1
                self._on_unavailable(self.name)
        if self._statistics is None:
            return
        signature = self._signature_of(call.model_name, call.model_version)
        version = call.model_version or (signature.version if signature is not None else "1")
        counters = _counters_of(self._statistics, call, version)
        counters.record_failure(reason, time.monotonic_ns() - start_ns)


def _counters_of(statistics: dict[ModelVersion, ModelStatistics], call: InferCall, version: str) -> ModelStatistics:
    """The counters of the version that answered, made with its first call; "" is the requested version."""
    key = call.model_name, version or call.model_version
    counters = statistics.get(key)
    if counters is None:
        counters = statistics[key] = ModelStatistics(*key)
    return counters
