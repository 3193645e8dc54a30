"""The cache of whole answers of a graph."""

from weft.base.caching.coalescing_cache import CoalescingCache
from weft.base.caching.response_cache import CachedResponse, cache_key, cache_key_base
from weft.base.errors import WeftError
from weft.base.tensors import WireTensor
from weft.language.plan import GraphPlan
from weft.router.policies.cache import CachePlan
from weft.router.requests.selection import Selection
from weft.router.runtime import Runtime
from weft.router.steps import ErrorContext, Run


class GraphAnswers:
    """Runs a graph once for equal requests: from the cache, or together while the first of them runs.

    Requests are equal when their inputs and requested outputs, in any order, are, and the value of the plan's key
    condition; headers and parameters do not count. Errors are not kept.

    Args:
        plan: The graph.
        cache: What is kept.
        error_context: The graph, for messages.
        runtime: The clock.
    """

    def __init__(self, plan: GraphPlan, cache: CachePlan, error_context: ErrorContext, runtime: Runtime) -> None:
        self._subject = ("", plan.signature.name, plan.signature.version)
        self._inputs = plan.root.inputs
        self._condition = cache.key
        self._error_context = error_context
        self._answers = CoalescingCache(
            runtime.share(cache.max_bytes), cache.ttl_ms, runtime.clock_ns, cache.stale_if_error_ms
        )

    async def outputs(self, run: Run, selection: Selection) -> tuple[dict[str, WireTensor], bool]:
        """The outputs, and whether they took no run of our own; response parameters are in the request of ``run``.

        Args:
            run: Of the root.
            selection: The requested outputs.

        Raises:
            WeftError: As the root raised it, for us or for an equal request, or our deadline passed meanwhile.
        """
        request, kept = run.request, sorted(selection.names)
        extra = ""
        if self._condition is not None:
            extra = self._error_context.text(self._condition, run, "cache key of the graph")
        inputs = [(name, run.frame[slot]) for name, slot in self._inputs]

        async def make() -> CachedResponse:
            own = run.fork()
            await selection.node.run(own)
            outputs = selection.outputs(own)
            return CachedResponse(tuple(map(outputs.get, kept)), own.request.response_parameters)

        key = cache_key(cache_key_base(self._subject, kept), inputs, extra)
        try:
            answer, is_cached = await self._answers.answer(key, make, run.deadline_ns)
        except WeftError as error:
            stale = self._answers.stale_on_unavailable(error, key)
            if stale is None:
                raise
            answer, is_cached = stale, True
        request.response_parameters.update(answer.parameters)
        found = dict(zip(kept, answer.outputs, strict=True))
        return {name: tensor for name in selection.names if (tensor := found[name]) is not None}, is_cached
