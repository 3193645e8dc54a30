"""An ``InferenceCore`` that does what a test tells it, by the name of the model that is called.

``echo`` answers its inputs, ``tokens`` answers three times, ``fail`` raises ``error``, ``hang`` waits for ``release``,
``count`` is decoupled and answers ``num`` times (a request parameter), the last time before gate ``last``.
The request parameter ``wait_for`` names a gate that must be opened before any of them answers.
"""

import asyncio
from collections import defaultdict

from weft.base.core import IndexEntry, InferResult
from weft.base.errors import NotFoundError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.statistics import BatchStatistics, DurationCount, ModelStatistics
from weft_protos.model_config_pb2 import ModelConfig

MODELS = ("echo", "fail", "hang", "tokens", "count")


class ScriptedCore:
    """See the module; ``calls`` and the events tell what happened."""

    def __init__(self):
        self.calls = []
        self._changed = asyncio.Event()
        self.error = NotFoundError("nothing here")
        self.control_error = None
        self.ready = True
        self.trailing = []
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.num_cancelled = 0
        self.num_counted = 0
        self.is_closed = False
        self.gates = defaultdict(asyncio.Event)
        self.loads = []
        self.counters = [_counters(name) for name in MODELS]

    async def until(self, predicate, timeout_s=5.0):
        """Return when ``predicate()`` holds; it is asked again after every call and every cancellation."""
        async with asyncio.timeout(timeout_s):
            while not predicate():
                self._changed.clear()
                await self._changed.wait()

    def is_ready(self):
        self._maybe_fail()
        return self.ready

    def is_model_ready(self, name, version):
        self._find(name, version)
        return name != "hang"

    def signature(self, name, version):
        self._find(name, version)
        spec = TensorSpec("x", "INT32", (-1,))
        return ModelSignature(name, "3", "scripted", 8, (spec, TensorSpec("s", "BYTES", (1,), True)), (spec,))

    def config(self, name, version):
        self._find(name, version)
        return ModelConfig(name=name, backend="scripted", max_batch_size=8)

    def index(self, *, ready_only):
        self._maybe_fail()
        entries = [IndexEntry("echo", "1", "READY", ""), IndexEntry("echo", "3", "READY", "")]
        return entries if ready_only else [*entries, IndexEntry("broken", "1", "UNAVAILABLE", "no model file")]

    def statistics(self, name, version):
        if name:
            self._find(name, version)
        return [entry for entry in self.counters if name in ("", entry.name)]

    async def infer(self, call, context):
        self.calls.append((call, context))
        self._changed.set()
        context.trailing_metadata.extend(self.trailing)
        try:
            if gate := call.parameters.get("wait_for"):
                await self.gates[gate].wait()
            if call.model_name == "hang":
                self.started.set()
                await self.release.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self._changed.set()
            self.cancelled.set()
            raise
        if call.model_name == "fail":
            raise self.error
        self._find(call.model_name, call.model_version)
        return InferResult(call.model_name, call.model_version or "3", call.request_id, call.parameters, call.inputs)

    async def stream_infer(self, call, context):
        if call.model_name == "count":
            async for result in self._count(call, context):
                yield result
            return
        result = await self.infer(call, context)
        if call.model_name == "tokens":
            for _ in range(2):
                result.is_final = False
                yield result
            result.is_final = True
        yield result

    async def _count(self, call, context):
        result = await self.infer(call, context)
        result.is_final = False
        try:
            for _ in range(call.parameters["num"]):
                self.num_counted += 1
                yield result
            await self.gates["last"].wait()
        except GeneratorExit:
            self.is_closed = True
            self._changed.set()
            raise
        yield InferResult("count", "3", call.request_id, is_null=True)

    async def load(self, name, parameters):
        self._find(name, "")
        self.loads.append(("load", name, parameters))

    async def unload(self, name, *, unload_dependents):
        self._find(name, "")
        self.loads.append(("unload", name, unload_dependents))

    def _find(self, name, version):
        self._maybe_fail()
        if name not in MODELS:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        if version not in ("", "1", "3"):
            raise NotFoundError(f"Request for unknown model: '{name}' version {version} is not found")

    def _maybe_fail(self):
        if self.control_error is not None:
            raise self.control_error


def _counters(name):
    """Counters in which no two figures are equal."""
    numbers = iter(range(len(name) * 100, len(name) * 100 + 50))

    def duration():
        return DurationCount(next(numbers), next(numbers) * 1000)

    def batch():
        return BatchStatistics(duration(), duration(), duration())

    return ModelStatistics(
        name=name,
        version="3",
        last_inference_ms=next(numbers),
        inference_count=next(numbers),
        execution_count=next(numbers),
        success=duration(),
        fail=duration(),
        queue=duration(),
        compute_input=duration(),
        compute_infer=duration(),
        compute_output=duration(),
        cache_hit=duration(),
        cache_miss=duration(),
        batches={8: batch(), 1: batch()},
        count_pending_by_level={0: next(numbers)}.copy,
    )
