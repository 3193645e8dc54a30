"""A target of several replicas, over replicas that answer as a test says: no socket."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError, UnavailableError
from weft.router.target import RetryBudget, Target, TargetModel
from weft.router.targets.replicas import REPLICAS_PER_DISCOVERY, Health, MembershipSettings, OnHealth
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
    fleet: Fleet, policy: str = "least_outstanding", by_grpc: Any = None
) -> AsyncIterator[ReplicatedTarget]:
    target = ReplicatedTarget(
        "model",
        ",".join(fleet.addresses),
        parse_policy(policy),
        fleet.settings(),
        by_grpc,
        clock_ns=lambda: fleet.now_ns,
        generator=random.Random(5),
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


async def test_calls_are_spread(fleet: Fleet) -> None:
    """Over all that serve; each is counted where it went."""
    async with replicated(fleet) as target:
        for _ in range(200):
            await infer(target)
        counts = fleet.calls()
        assert (200, 2) == (counts.total(), len(counts))
        assert min(counts.values()) > 70
        assert counts == {one.address: one.num_by_status["OK"] for one in target.replicas}


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


async def test_a_replica_that_says_it_is_not_serving_gets_no_calls(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it says otherwise; where none is serving, those that can be reached are called all the same."""
    monkeypatch.setattr("weft.router.targets.replicated.MAX_WAIT_S", 0.05)
    async with replicated(fleet) as target:
        fleet.tells["a:1"](Health.NOT_SERVING)
        for _ in range(20):
            await infer(target)
        assert {"b:1": 20} == fleet.calls()
        fleet.tells["b:1"](Health.NOT_SERVING)
        await infer(target)
        fleet.tells["b:1"](Health.UNREACHABLE)
        for _ in range(5):
            await infer(target)
        assert fleet.calls()["a:1"] >= 5
        fleet.tells["a:1"](Health.UNREACHABLE)
        with pytest.raises(UnavailableError, match=r"'m' is not ready on any replica of target 'model' \(a:1,b:1\)"):
            await infer(target)


async def test_a_refused_call_goes_elsewhere_once(fleet: Fleet) -> None:
    """Without a retry policy: it was not begun. The replica is no outlier for it."""
    async with replicated(fleet) as target:
        fleet.fakes["a:1"].answers["m"] = _raise(refusal)
        for _ in range(40):
            await infer(target)
        assert 40 == fleet.calls()["b:1"]
        assert target.num_moved == fleet.calls()["a:1"] > 0
        assert [0, 0] == [one.record.num_ejected for one in target.replicas]
        fleet.fakes["b:1"].answers["m"] = _raise(refusal)
        before = fleet.calls().total()
        with pytest.raises(RemoteError, match="shutting down"):
            await infer(target)
        assert before + 2 == fleet.calls().total()


async def test_a_call_that_nobody_begins_is_made_at_each_replica_within_the_budget() -> None:
    """Of three two refuse, and calls and streams are answered by the third; without a budget they are not moved."""
    fleet = Fleet(["a:1", "b:1", "c:1"])
    async with replicated(fleet) as target:
        for address in ("a:1", "b:1"):
            fleet.fakes[address].answers["m"] = _raise(refusal)
        for _ in range(40):
            await infer(target)
        assert (40, True) == (fleet.calls()["c:1"], target.num_moved > 40)
        target.budget = RetryBudget(max_tokens=1)
        fleet.fakes["c:1"].answers["m"] = _raise(refusal)
        before = fleet.calls().total()
        with pytest.raises(RemoteError, match="shutting down"):
            await infer(target)
        assert (2, 1) == (fleet.calls().total() - before, target.budget.num_refused)


async def test_a_stream_that_gave_nothing_is_begun_at_each_replica() -> None:
    """Two refuse, the third gives its responses."""
    async with replicated(Fleet(["a:1", "b:1", "c:1"])) as target:
        for replica, error, num_inflight in zip(target.replicas, (refusal(), refusal(), None), (0, 0, 9), strict=True):
            replica.target = Streaming(replica.address, 0 if error else 3, error)  # type: ignore[assignment]
            replica.num_inflight = num_inflight
        for _ in range(10):
            assert 4 == len([result async for result in target.stream_infer(call(), CallContext())])
        assert target.num_moved > 10


def _raise(error: Callable[[], Exception]) -> Any:
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
        fleet.fakes["b:1"].answers["m"] = _raise(refusal)
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
        fleet.fakes["a:1"].answers["m"] = _raise(lambda: RemoteError(code, "not ready").refused())
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        with pytest.raises(RemoteError, match="not ready"):
            await infer(target)
        assert least_s <= loop.time() - begin_s < 1
        assert 1 == fleet.calls()["a:1"]


async def test_a_call_that_may_have_run_is_not_made_again(fleet: Fleet) -> None:
    """Whether to do so is for the graph's retry policy to say."""
    async with replicated(fleet) as target:
        for fake in fleet.fakes.values():
            fake.answers["m"] = _raise(lost)
        with pytest.raises(RemoteError, match="Socket closed"):
            await infer(target)
        assert 1 == fleet.calls().total()


async def test_a_further_attempt_goes_to_another_replica() -> None:
    """As long as there is one that was not tried; then to any."""
    fleet = Fleet(["a:1", "b:1", "c:1"])
    async with replicated(fleet) as target:
        for _ in range(20):
            tried: list[str] = []
            for _ in range(3):
                await infer(target, tried=tried)
            assert {"a:1", "b:1", "c:1"} == set(tried)
            await infer(target, tried=tried)
            assert 4 == len(tried)


async def test_a_replica_that_loses_calls_is_ejected(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """After five in a row, which the log says; it is back when its time is over."""
    async with replicated(fleet) as target:
        fleet.fakes["a:1"].answers["m"] = _raise(lost)
        num_failed = 0
        for _ in range(100):
            with contextlib.suppress(RemoteError):
                await infer(target)
                continue
            num_failed += 1
        assert 5 == num_failed
        ejected = [one.address for one in target.replicas if target.is_ejected(one)]
        assert ["a:1"] == ejected
        assert ["replica a:1 of target 'model' is ejected for 1 s"] == caplog.messages
        fleet.now_ns += 5_000_000_001
        del fleet.fakes["a:1"].answers["m"]
        for _ in range(20):
            await infer(target)
        assert fleet.calls()["a:1"] > 5


@pytest.mark.parametrize("policy", ["least_outstanding", "round_robin"])
async def test_a_replica_that_fails_at_once_is_ejected_and_counted(fleet: Fleet, policy: str) -> None:
    """INTERNAL, which is soon answered and so draws calls: after a few of them, whoever chooses."""
    async with replicated(fleet, policy) as target:
        for _ in range(40):
            await infer(target)
        fleet.fakes["a:1"].answers["m"] = _raise(lambda: RemoteError("INTERNAL", "broken"))
        num_failed = 0
        for _ in range(200):
            with contextlib.suppress(RemoteError):
                await infer(target)
                continue
            num_failed += 1
        assert 0 < num_failed <= 20
        assert [1, 0] == [one.record.num_ejected for one in target.replicas]


async def test_a_new_process_at_the_address_is_called_at_once(fleet: Fleet) -> None:
    """What the old one did is not held against it."""
    async with replicated(fleet) as target:
        (first, _) = target.replicas
        first.record.until_ns = fleet.now_ns + 10**12
        fleet.tells["a:1"](Health.UNREACHABLE)
        fleet.tells["a:1"](Health.SERVING)
        await target.discover(timeout_s=1)
        for _ in range(20):
            await infer(target)
        assert fleet.calls()["a:1"] > 0


async def test_calls_go_only_where_the_model_is_ready(fleet: Fleet) -> None:
    """Models and versions differ while one replica is replaced."""
    async with replicated(fleet) as target:
        old, new = make.signature("m", version="1"), make.signature("m", version="2")
        fleet.fakes["a:1"].models = [TargetModel(old, True)]
        fleet.fakes["b:1"].models = [TargetModel(old, True), TargetModel(new, True)]
        models = await target.discover(timeout_s=1)
        assert {("1", True), ("2", True)} == {(model.signature.version, model.is_ready) for model in models}
        for _ in range(10):
            await infer(target, call(version="2"))
        assert {"b:1": 10} == fleet.calls()
        for _ in range(20):
            await infer(target, call(version="1"))
            await infer(target)
        assert fleet.calls()["a:1"] > 5
        with pytest.raises(UnavailableError, match=r"'m' version 3 is not ready"):
            await infer(target, call(version="3"))


async def test_without_a_version_the_highest_decides(fleet: Fleet) -> None:
    """Replicas whose default version has another signature get no calls that name none."""
    async with replicated(fleet) as target:
        new = replace(make.signature("m", version="2"), max_batch_size=8)
        fleet.fakes["b:1"].models = [TargetModel(new, True)]
        await target.discover(timeout_s=1)
        for _ in range(10):
            await infer(target)
        assert {"b:1": 10} == fleet.calls()


async def test_the_odd_one_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """One of three replicas has another signature: it gets calls of other models alone, and that is told once."""
    fleet = Fleet(["a:1", "b:1", "c:1"], *(TargetModel(make.signature(name), True) for name in "mn"))
    async with replicated(fleet) as target:
        mismatched = replace(make.signature("m"), max_batch_size=9)
        fleet.fakes["a:1"].models = [TargetModel(mismatched, True), TargetModel(make.signature("n"), True)]
        for _ in range(2):
            models = await target.discover(timeout_s=1)
        assert ["replica a:1 of target 'model' has another signature of model 'm'"] == [
            message.partition(" version")[0] for message in caplog.messages if "signature" in message
        ]
        assert make.signature("m") in [model.signature for model in models]
        assert {("m", "1")} == target.replicas[0].mismatched
        for _ in range(30):
            await infer(target)
        assert "a:1" not in fleet.calls()
        for _ in range(30):
            await infer(target, call("n"))
        assert "a:1" in fleet.calls()


async def test_a_replica_that_loads_keeps_what_is_known_of_a_model(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """It lists the model and tells no more, which is no other signature; it gets no calls of it."""
    async with replicated(fleet) as target:
        (model,) = fleet.models
        fleet.fakes["a:1"].models = [TargetModel.undescribed("m", "1", "LOADING", "")]
        for is_ready in (True, False):
            fleet.fakes["b:1"].models = [model._replace(is_ready=is_ready)]
            (found,) = await target.discover(timeout_s=1)
            assert (model.signature, is_ready) == (found.signature, found.is_ready)
        fleet.fakes["b:1"].models = [model]
        await target.discover(timeout_s=1)
        for _ in range(20):
            await infer(target)
        assert {"b:1": 20} == fleet.calls()
    assert "another signature" not in caplog.text


async def test_the_target_answers_as_long_as_one_replica_does(fleet: Fleet) -> None:
    """Models of one that does not are not ready there; without any the error of the first is told."""
    async with replicated(fleet) as target:
        fleet.fakes["a:1"].models = RemoteError("UNAVAILABLE", "gone")
        (model,) = await target.discover(timeout_s=1)
        assert model.is_ready
        for _ in range(10):
            await infer(target)
        assert {"b:1": 10} == fleet.calls()
        fleet.fakes["b:1"].models = RemoteError("UNAVAILABLE", "gone too")
        with pytest.raises(RemoteError, match="gone"):
            await target.discover(timeout_s=1)


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
        fleet.fakes["r:7"].answers["m"] = _raise(lost)
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


@pytest.mark.parametrize("policy", ["least_outstanding", "sticky", "round_robin"])
async def test_a_sequence_stays_on_its_replica(policy: str) -> None:
    """Whatever the policy; sequences are spread."""
    fleet = Fleet(["a:1", "b:1", "c:1"])
    async with replicated(fleet, policy, by_grpc=FakeTarget("grpc")) as target:
        homes = {}
        for number in range(1, 41):
            tried: list[str] = []
            await infer(target, in_sequence(number, start=True), tried=tried)
            await infer(target, in_sequence(number), tried=tried)
            await infer(target, in_sequence(number, end=True), tried=tried)
            homes[number] = set(tried)
        assert {1} == {len(places) for places in homes.values()}
        assert 3 == len(set.union(*homes.values()))


async def test_a_live_sequence_never_moves(fleet: Fleet) -> None:
    """Its replica is lost: it is told so, once; then it may start again elsewhere."""
    async with replicated(fleet) as target:
        tried: list[str] = []
        await infer(target, in_sequence("s", start=True), tried=tried)
        (home,) = tried
        other = ({"a:1", "b:1"} - {home}).pop()
        for health in (Health.NOT_SERVING, Health.SERVING):
            fleet.tells[home](health)
            await infer(target, in_sequence("s"), tried=tried)
        assert [home, home, home] == tried
        fleet.tells[home](Health.UNREACHABLE)
        with pytest.raises(UnavailableError, match=r"sequence 's' ended: the replica .* is lost; start it again"):
            await infer(target, in_sequence("s"))
        await infer(target, in_sequence("s", start=True))
        await infer(target, in_sequence("s", end=True))
        assert {home: 3, other: 2} == fleet.calls()


async def test_a_sequence_whose_replica_refuses_is_lost(fleet: Fleet) -> None:
    """Its first request may go elsewhere, and then the sequence lives there."""
    async with replicated(fleet) as target:
        tried: list[str] = []
        await infer(target, in_sequence(1, start=True), tried=tried)
        fleet.fakes[tried[0]].answers["m"] = _raise(refusal)
        with pytest.raises(UnavailableError, match="sequence 1 ended"):
            await infer(target, in_sequence(1))
        await infer(target, in_sequence(1, start=True), tried=tried)
        await infer(target, in_sequence(1), tried=tried)
        assert {tried[-1]} == set(tried[-2:]) != {tried[0]}


async def test_a_sequence_that_another_router_started_is_found() -> None:
    """The order of the replicas for its id is the same everywhere."""
    places = []
    for _ in range(2):
        fleet = Fleet(["a:1", "b:1", "c:1"])
        async with replicated(fleet) as target:
            tried: list[str] = []
            for number in range(1, 30):
                await infer(target, in_sequence(number, start=not places), tried=tried)
            places.append(tried)
    assert places[0] == places[1]


async def test_sticky_calls_of_one_key_stay_together() -> None:
    """By a header or a parameter; keys are spread, and those of a lost replica move on."""
    for policy in ("sticky:header=x-user", "sticky:parameter=user"):
        fleet = Fleet(["a:1", "b:1", "c:1"])
        async with replicated(fleet, policy) as target:
            homes: dict[str, set[str]] = {}
            for i in range(90):
                key, tried = f"u{i % 30}", []
                await infer(target, call(user=key), headers={"x-user": key}, tried=tried)
                homes.setdefault(key, set()).update(tried)
            assert {1} == {len(places) for places in homes.values()}
            assert 3 == len(set.union(*homes.values()))
            fleet.tells["a:1"](Health.NOT_SERVING)
            moved = []
            for key, home in homes.items():
                tried = []
                await infer(target, call(user=key), headers={"x-user": key}, tried=tried)
                if set(tried) != home:
                    moved.append(home)
            assert [{"a:1"}] * len(moved) == moved


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
