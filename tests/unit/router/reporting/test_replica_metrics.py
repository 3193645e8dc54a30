"""What Prometheus and traces are told of replicas."""

import asyncio
from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import set_span_in_context
from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError
from weft.base.observing import telemetry
from weft.router.metrics import TargetCollector
from weft.router.target import Target, TargetModel
from weft.router.targets.catalog import TargetCatalog
from weft.router.targets.replicas import Health, MembershipSettings, OnHealth
from weft.router.targets.replicated import ReplicatedTarget
from weft.router.targets.specification import BalancingPolicy


async def two_replicas() -> tuple[ReplicatedTarget, dict[str, Any]]:
    """A target whose replica `a:1` refuses every call."""
    fakes: dict[str, Any] = {}

    async def refuse(call: InferCall, context: CallContext) -> InferResult:
        raise RemoteError("UNAVAILABLE", "draining").refused()

    def connect(address: str) -> Any:
        fakes[address] = FakeTarget(address, **({"m": refuse} if address == "a:1" else {}))
        fakes[address].models = [TargetModel(make.signature("m"), True)]
        return fakes[address]

    async def resolve() -> Sequence[str]:
        return ["a:1", "b:1"]

    async def watch(target: Target, tell: OnHealth) -> None:
        tell(Health.SERVING)
        await asyncio.Event().wait()

    target = ReplicatedTarget("model", "a:1,b:1", BalancingPolicy(), MembershipSettings(resolve, True, connect, watch))
    await target.discover(timeout_s=1)
    await asyncio.sleep(0)
    return target, fakes


async def test_every_replica_has_its_figures() -> None:
    """As long as it is there; the state is the one label that is 1."""
    target, _ = await two_replicas()
    for _ in range(40):
        await target.infer(InferCall("m"), CallContext())
    catalog = TargetCatalog([target], retry_percent=0)
    catalog.budgets["model"].take()
    registry = CollectorRegistry()
    registry.register(TargetCollector(catalog))
    text = generate_latest(registry).decode()
    for line in (
        f'weft_endpoint_requests_total{{endpoint="a:1",status="UNAVAILABLE",target="model"}} {float(target.num_moved)}',
        'weft_endpoint_requests_total{endpoint="b:1",status="OK",target="model"} 40.0',
        'weft_endpoint_picks_total{endpoint="b:1",target="model"} 40.0',
        'weft_endpoint_ejections_total{endpoint="a:1",target="model"} 0.0',
        'weft_endpoint_inflight{endpoint="b:1",target="model"} 0.0',
        'weft_endpoint_state{endpoint="a:1",state="serving",target="model"} 1.0',
        f'weft_target_moved_calls_total{{target="model"}} {float(target.num_moved)}',
        'weft_target_retries_refused_total{target="model"} 1.0',
    ):
        assert line in text.splitlines()
    first, _ = target.replicas
    first.record.until_ns = 2**62
    assert 'state="ejected"' in generate_latest(registry).decode()
    first.is_leaving = True
    assert 'state="leaving"' in generate_latest(registry).decode()
    await target.close()


async def test_a_span_says_which_replica_answered(monkeypatch: Any) -> None:
    """And that the call was given to another one before."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "is_enabled", lambda: True)
    target, _ = await two_replicas()
    target.replicas[1].num_inflight = 1  # the first is chosen
    span = provider.get_tracer("t").start_span("step")
    await target.infer(InferCall("m"), CallContext(trace_context=set_span_in_context(span)))
    span.end()
    (ended,) = exporter.get_finished_spans()
    assert "b:1" == ended.attributes["weft.endpoint"]
    (event,) = ended.events
    assert ("weft.call_moved", "a:1", "b:1") == (
        event.name,
        event.attributes["weft.refused_by"],
        event.attributes["weft.endpoint"],
    )
    await target.close()
