"""A target of several replicas, over replicas that answer as a test says: no socket."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, failing

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError, UnavailableError
from weft.router.target import Target, TargetModel
from weft.router.targets.replicas import REPLICAS_PER_DISCOVERY, Health, MembershipSettings, OnHealth, Pins
from weft.router.targets.replicated import CHOSEN_BY_GRPC, ReplicatedTarget
from weft.router.targets.specification import BalancingPolicy, parse_policy


def refusal() -> RemoteError:
    return RemoteError("UNAVAILABLE", "shutting down").refused()


def lost() -> RemoteError:
    return RemoteError("UNAVAILABLE", "cannot be reached: Socket closed", is_unanswered=True)


class Fleet:
    """Replicas by address, each a `FakeTarget`; `tell` says how one is."""

    def __init__(self, addresses: Sequence[str], *models: TargetModel) -> None:
        self.models = list(models) or [TargetModel(make.signature("m"), True)]
        self.addresses = list(addresses)
        self.fakes: dict[str, Any] = {}
        self.tells: dict[str, OnHealth] = {}
        self.now_ns = 1_000_000_000
        self.resolved = asyncio.Event()

    async def resolve(self) -> Sequence[str]:
        self.resolved.set()
        return list(self.addresses)

    def connect(self, address: str) -> Any:
        self.fakes[address] = fake = FakeTarget(address)
        fake.models = list(self.models)
        return fake

    async def watch(self, target: Target, tell: OnHealth) -> None:
        self.tells[target.name] = tell
        tell(Health.SERVING)
        await asyncio.Event().wait()

    def settings(self, *, is_fixed: bool = True) -> MembershipSettings:
        return MembershipSettings(self.resolve, is_fixed, self.connect, self.watch)

    def calls(self) -> Counter[str]:
        return Counter({address: len(fake.calls) for address, fake in self.fakes.items() if fake.calls})


@asynccontextmanager
async def replicated(
    fleet: Fleet, policy: str = "least_outstanding", by_grpc: Any = None, **options: Any
) -> AsyncIterator[ReplicatedTarget]:
    target = ReplicatedTarget(
        "model",
        ",".join(fleet.addresses),
        parse_policy(policy),
        fleet.settings(),
        by_grpc,
        clock_ns=lambda: fleet.now_ns,
        generator=random.Random(5),
        **options,
    )
    await target.discover(timeout_s=1)
    await asyncio.sleep(0)  # the watches have begun
    try:
        yield target
    finally:
        await target.close()


def call(model: str = "m", version: str = "", **parameters: Any) -> InferCall:
    return InferCall(model, version, parameters=parameters)


def in_sequence(number: int | str, *, start: bool = False, end: bool = False) -> InferCall:
    return call(sequence_id=number, sequence_start=start, sequence_end=end)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(["a:1", "b:1"])


async def infer(target: ReplicatedTarget, one: InferCall | None = None, **context: Any) -> InferResult:
    return await target.infer(one or call(), CallContext(**context))


async def test_a_call_in_flight_counts(fleet: Fleet) -> None:
    """The next goes to the other replica."""
    release = asyncio.Event()

    async def hold(call: InferCall, context: CallContext) -> dict[str, Any]:
        await release.wait()
        return {}

    async with replicated(fleet) as target:
        for fake in fleet.fakes.values():
            fake.answers["m"] = hold
        calls = []
        for _ in range(6):
            calls.append(asyncio.create_task(infer(target)))
            await asyncio.sleep(0)
        assert {"a:1": 3, "b:1": 3} == fleet.calls()
        assert [3, 3] == [one.num_inflight for one in target.replicas]
        release.set()
        await asyncio.gather(*calls)
        assert [0, 0] == [one.num_inflight for one in target.replicas]


async def test_a_cancelled_call_leaves_nothing_behind(fleet: Fleet) -> None:
    """No call in flight, and nothing against the replica."""
    async with replicated(fleet) as target:
        for fake in fleet.fakes.values():
            fake.answers["m"] = lambda call, context: asyncio.Event().wait()
        task = asyncio.create_task(infer(target))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [0, 0] == [one.num_inflight for one in target.replicas]
        assert [{"CANCELLED": 1}] == [one.num_by_status for one in target.replicas if one.num_by_status]


async def test_what_changes_a_model_reaches_all_its_replicas(fleet: Fleet) -> None:
    """A load of an adapter, and its end; one that fails fails the call, and the others are asked nevertheless."""
    async with replicated(fleet) as target:
        await target.infer(call(load_lora_adapter="sql", lora_path="sql"), CallContext())
        assert {"a:1": 1, "b:1": 1} == fleet.calls()
        fleet.fakes["a:1"].answers["m"] = failing("NOT_FOUND", "'sql' is not loaded")
        with pytest.raises(RemoteError, match="is not loaded"):
            await target.infer(call(unload_lora_adapter="sql"), CallContext())
        assert {"a:1": 2, "b:1": 2} == fleet.calls()
        await target.infer(call(), CallContext())
        assert 5 == fleet.calls().total()


async def test_a_stream_that_gave_nothing_is_begun_at_each_replica() -> None:
    """Two refuse, the third gives its responses."""
    async with replicated(Fleet(["a:1", "b:1", "c:1"])) as target:
        for replica, error, num_inflight in zip(target.replicas, (refusal(), refusal(), None), (0, 0, 9), strict=True):
            replica.target = Streaming(replica.address, 0 if error else 3, error)  # type: ignore[assignment]
            replica.num_inflight = num_inflight
        for _ in range(10):
            assert 4 == len([result async for result in target.stream_infer(call(), CallContext())])
        assert target.num_moved > 10


def raising(error: Callable[[], Exception]) -> Any:
    async def answer(call: InferCall, context: CallContext) -> dict[str, Any]:
        raise error()

    return answer


async def test_a_call_waits_for_a_replica_that_is_about_to_come(fleet: Fleet) -> None:
    """When the last was lost a moment ago, or refuses; and no longer than its deadline allows."""
    async with replicated(fleet) as target:
        await infer(target)
        for tell in fleet.tells.values():
            tell(Health.UNREACHABLE)
        with pytest.raises(UnavailableError, match="not ready on any replica"):
            await infer(target, deadline_ns=fleet.now_ns + 10_000_000)
        waiting = asyncio.create_task(infer(target))
        await asyncio.sleep(0)
        fleet.tells["b:1"](Health.SERVING)
        await asyncio.sleep(0)
        assert not waiting.done()
        await target.discover(timeout_s=1)
        await waiting
        fleet.fakes["b:1"].answers["m"] = raising(refusal)
        fleet.tells["b:1"](Health.NOT_SERVING)
        waiting = asyncio.create_task(infer(target))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        fleet.tells["a:1"](Health.SERVING)
        await target.discover(timeout_s=1)
        await waiting
        fleet.now_ns += 3_000_000_000
        for tell in fleet.tells.values():
            tell(Health.UNREACHABLE)
        with pytest.raises(UnavailableError, match="not ready on any replica"):
            async with asyncio.timeout(1):
                await infer(target)


@pytest.mark.parametrize(("code", "least_s"), [("NOT_FOUND", 0), ("UNAVAILABLE", 0.05)])
async def test_a_refusal_by_the_only_replica_is_told_soon(
    monkeypatch: pytest.MonkeyPatch, code: str, least_s: float
) -> None:
    """At once where waiting cannot help; else as soon as word of its health would have come."""
    monkeypatch.setattr("weft.router.targets.replicated.SHORT_WAIT_S", 0.05)
    fleet = Fleet(["a:1"])
    async with replicated(fleet) as target:
        fleet.fakes["a:1"].answers["m"] = raising(lambda: RemoteError(code, "not ready").refused())
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        with pytest.raises(RemoteError, match="not ready"):
            await infer(target)
        assert least_s <= loop.time() - begin_s < 1
        assert 1 == fleet.calls()["a:1"]


async def test_of_many_replicas_a_few_are_asked_at_a_time() -> None:
    """Each in its turn, the new ones at once; when one of them says something else than before, all are."""
    fleet = Fleet([f"r:{i}" for i in range(1, 41)])
    async with replicated(fleet) as target:

        async def num_asked() -> int:
            before = sum(fake.num_discoveries for fake in fleet.fakes.values())
            fleet.now_ns += 1
            await target.discover(timeout_s=1)
            return sum(fake.num_discoveries for fake in fleet.fakes.values()) - before

        assert {1} == {fake.num_discoveries for fake in fleet.fakes.values()}
        assert [REPLICAS_PER_DISCOVERY] * 5 == [await num_asked() for _ in range(5)]
        assert {2} == {fake.num_discoveries for fake in fleet.fakes.values()}
        for fake in fleet.fakes.values():
            fake.models = [*fleet.models, TargetModel(make.signature("n"), True)]
        assert [REPLICAS_PER_DISCOVERY, 32, REPLICAS_PER_DISCOVERY] == [await num_asked() for _ in range(3)]
        for _ in range(400):
            await infer(target, call("n"))
        assert 40 == len(fleet.calls())
        fleet.fakes["r:7"].answers["m"] = raising(lost)
        while not fleet.calls()["r:7"]:
            await infer(target)
        fleet.tells["r:9"](Health.UNREACHABLE)
        before = {address: fake.num_discoveries for address, fake in fleet.fakes.items()}
        await num_asked()
        assert before["r:9"] == fleet.fakes["r:9"].num_discoveries


async def test_a_replica_that_hangs_does_not_keep_the_others_waiting(fleet: Fleet) -> None:
    """What it says later is taken over then; it is not asked twice at a time."""
    released = asyncio.Event()
    changed = asyncio.Event()
    async with replicated(fleet) as target:
        target.on_change = changed.set
        hanging = fleet.fakes["a:1"]

        async def hang(*, timeout_s: float) -> list[TargetModel]:
            hanging.num_discoveries += 1
            await released.wait()
            return [TargetModel(make.signature("n"), True)]

        hanging.discover, hanging.num_discoveries = hang, 0
        async with asyncio.timeout(5):
            for _ in range(2):
                (model,) = await target.discover(timeout_s=60)
                assert ("m", True) == (model.signature.name, model.is_ready)
            assert 1 == hanging.num_discoveries
            released.set()
            changed.clear()
            await changed.wait()
        assert {"m", "n"} == {model.signature.name for model in await target.discover(timeout_s=60)}


async def test_what_a_replica_says_late_is_compared_before_it_is_called(fleet: Fleet) -> None:
    """Another signature than before gets no calls until it is known whether it is the odd one."""
    async with replicated(fleet) as target:
        first, _ = target.replicas
        first.learn([TargetModel(replace(make.signature("m"), max_batch_size=9), True)])
        target._on_change()
        for _ in range(20):
            await infer(target)
        assert {"b:1": 20} == fleet.calls()


async def test_grpc_chooses_where_its_policy_is_asked_for(fleet: Fleet) -> None:
    """As long as every healthy replica has the model; else the router chooses among those that have it."""
    by_grpc = FakeTarget("grpc")
    async with replicated(fleet, "weighted_round_robin", by_grpc) as target:
        await infer(target)
        assert (1, {}) == (len(by_grpc.calls), fleet.calls())
        fleet.fakes["a:1"].models = []
        await target.discover(timeout_s=1)
        await infer(target)
        assert (1, {"b:1": 1}) == (len(by_grpc.calls), fleet.calls())
        assert CHOSEN_BY_GRPC == target.replicas[0].address
    assert by_grpc.is_closed


async def test_replicas_follow_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one is called when it has said what it serves; one that left finishes its calls and its sequences first."""
    monkeypatch.setattr("weft.router.targets.replicas.RESOLVE_SOON_S", 0.0)
    monkeypatch.setattr("weft.router.targets.replicas.RESOLVE_PERIOD_S", 0.01)
    monkeypatch.setattr("weft.router.targets.replicas._DRAIN_CHECK_S", 0.001)
    fleet = Fleet(["a:1"])
    changed = asyncio.Event()
    target = ReplicatedTarget(
        "model", "dns:///m:1", BalancingPolicy(), fleet.settings(is_fixed=False), clock_ns=lambda: fleet.now_ns
    )
    target.on_change = changed.set
    await target.discover(timeout_s=1)
    release = asyncio.Event()

    async def hold(call: InferCall, context: CallContext) -> dict[str, Any]:
        await release.wait()
        return {}

    async def until(claim: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not claim():
                changed.clear()
                await changed.wait()

    await infer(target, in_sequence(1, start=True))
    fleet.fakes["a:1"].answers["m"] = hold
    held = asyncio.create_task(infer(target))
    await asyncio.sleep(0)
    fleet.addresses = ["b:1"]
    await until(lambda: [True, False] == [one.is_leaving for one in target.replicas])
    await target.discover(timeout_s=1)
    for _ in range(5):
        await infer(target)
    assert 5 == fleet.calls()["b:1"]
    release.set()
    await held
    await infer(target, in_sequence(1))
    assert not fleet.fakes["a:1"].is_closed
    await infer(target, in_sequence(1, end=True))
    await until(lambda: ["b:1"] == [one.address for one in target.replicas])
    assert fleet.fakes["a:1"].is_closed
    await target.close()


async def test_a_name_without_an_address_is_told() -> None:
    """At discovery, again and again; when it can be resolved, the target serves."""
    fleet = Fleet([])
    target = ReplicatedTarget("model", "dns:///m:1", BalancingPolicy(), fleet.settings())
    with pytest.raises(UnavailableError, match=r"target 'model' \(dns:///m:1\) has no address"):
        await target.discover(timeout_s=1)
    with pytest.raises(UnavailableError, match="is not ready on any replica"):
        await infer(target)
    fleet.addresses = ["a:1"]
    assert 1 == len(await target.discover(timeout_s=1))
    await target.close()


class Streaming:
    """A replica whose stream gives so many responses and then fails, or ends."""

    def __init__(self, address: str, num_responses: int, error: Exception | None) -> None:
        self.name = self.address = address
        self.num_responses, self.error, self.num_calls = num_responses, error, 0

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncIterator[InferResult]:
        self.num_calls += 1
        for _ in range(self.num_responses):
            yield InferResult("m", "1", is_final=False)
        if self.error is not None:
            raise self.error
        yield InferResult("m", "1", is_null=True)

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        return []

    async def close(self) -> None: ...


@pytest.mark.parametrize(("num_responses", "is_saved"), [(0, True), (1, False)])
async def test_a_stream_moves_only_before_its_first_response(fleet: Fleet, num_responses: int, is_saved: bool) -> None:
    """Then only if it was refused."""
    async with replicated(fleet) as target:
        first, second = target.replicas
        first.target = Streaming("a:1", num_responses, refusal())  # type: ignore[assignment]
        second.target = Streaming("b:1", 3, None)  # type: ignore[assignment]
        second.num_inflight = 1  # the first is chosen
        if is_saved:
            results = [result async for result in target.stream_infer(call(), CallContext())]
            assert (4, True) == (len(results), results[-1].is_final)
        else:
            with pytest.raises(RemoteError, match="shutting down"):
                _ = [result async for result in target.stream_infer(call(), CallContext())]
        assert (1, int(is_saved)) == (first.target.num_calls, second.target.num_calls)  # type: ignore[attr-defined]
        assert [0, 1] == [one.num_inflight for one in target.replicas]


def test_a_sequence_stays_where_it_is_until_it_is_over() -> None:
    """A number and a text that look alike are two sequences."""
    pins = Pins(lambda: 0)
    pins.set(("m", 1), "a")
    pins.set(("m", "1"), "b")
    assert ("a", "b", None) == (pins.get(("m", 1)), pins.get(("m", "1")), pins.get(("n", 1)))
    assert (True, False) == (pins.has("a"), pins.has("c"))
    pins.forget(("m", 1))
    pins.forget(("m", 1))
    assert (None, False) == (pins.get(("m", 1)), pins.has("a"))


def test_the_longest_idle_is_forgotten_first() -> None:
    """A request makes a sequence young again; memory is bounded."""
    pins = Pins(lambda: 0, max_pins=2)
    for sequence in ("a", "b", "a", "c"):
        pins.set(sequence, sequence)
    assert (2, "a", None) == (len(pins), pins.get("a"), pins.get("b"))


def test_an_idle_sequence_has_ended() -> None:
    """After an hour without a request; what is idle is dropped when another one has a request."""
    now_s = 0
    pins = Pins(lambda: now_s * 10**9, max_idle_s=3600)
    pins.set("a", "x")
    now_s = 3599
    assert "x" == pins.get("a")
    now_s = 3600
    assert pins.get("a") is None
    pins.set("b", "x")
    assert 1 == len(pins)
