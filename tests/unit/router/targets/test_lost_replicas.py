"""Calls whose replica is lost while it works on them: which are made again, and how often."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.targets.test_replicated import Fleet, Streaming, call, in_sequence, infer, lost, replicated

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.router.metrics import TargetCollector
from weft.router.target import RetryBudget, TargetModel
from weft.router.targets.catalog import TargetCatalog
from weft.router.targets.replicas import Health
from weft.router.targets.replicated import REPEATED_HEADER


def fleet_of(*addresses: str, can_repeat: bool = True, losing: Sequence[str] = ()) -> Any:
    """Replicas of one model, those that are ``losing`` lost by every call."""
    fleet = Fleet(addresses, TargetModel(replace(make.signature("m"), can_repeat=can_repeat), True))
    connect = fleet.connect

    def connected(address: str) -> Any:
        fake = connect(address)
        if address in losing:
            fake.answers["m"] = lose
        return fake

    fleet.connect = connected  # type: ignore[method-assign]
    return fleet


async def lose(call: InferCall, context: CallContext) -> dict[str, Any]:
    raise lost()


async def test_a_lost_call_is_made_again_at_another_replica() -> None:
    """It carries the header that tells services behind it so; the metric counts it."""
    fleet = fleet_of("a:1", "b:1", losing=["a:1"])
    async with replicated(fleet) as target:
        for _ in range(20):
            await infer(target)
        assert 20 == fleet.calls()["b:1"]
        assert (target.num_repeated, 0) == (fleet.calls()["a:1"], target.num_moved)
        repeated = [one for one in fleet.fakes["b:1"].contexts if REPEATED_HEADER in one.headers]
        assert target.num_repeated == len(repeated) > 0


@pytest.mark.parametrize(
    ("can_repeat", "made", "headers", "num_tokens"),
    [
        (False, call(), {}, 100),
        (True, in_sequence(7, start=True), {}, 100),
        (True, call(), {REPEATED_HEADER: "1"}, 100),
        (True, call(), {}, 0),
    ],
    ids=["the model may have effects", "of a sequence", "repeated by a router before", "no budget"],
)
async def test_it_fails_where_it_may_not_be_made_again(
    can_repeat: bool, made: InferCall, headers: dict[str, str], num_tokens: float
) -> None:
    """The client is told what was lost."""
    fleet = fleet_of("a:1", "b:1", can_repeat=can_repeat, losing=["a:1", "b:1"])
    async with replicated(fleet) as target:
        target.budget = RetryBudget(max_tokens=num_tokens)
        with pytest.raises(RemoteError, match="Socket closed"):
            await infer(target, made, headers=headers)
        assert 1 == fleet.calls().total()


async def test_a_request_that_was_lost_twice_is_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    """Neither this call nor another of the same client's request; the log names it."""
    fleet = fleet_of("a:1", "b:1", "c:1", losing=["a:1", "b:1", "c:1"])
    root = CallContext()
    async with replicated(fleet) as target:
        with caplog.at_level(logging.WARNING), pytest.raises(RemoteError, match="Socket closed"):
            await infer(target, InferCall("m", request_id="r7"), root=root)
        assert 2 == fleet.calls().total() == len(root.lost)
        with pytest.raises(RemoteError, match="Socket closed"):
            await infer(target, root=root)
        assert 3 == fleet.calls().total()
    assert "request 'r7' of model 'm' was in work at 2 replicas that were lost" in caplog.text


async def test_calls_of_one_request_that_are_lost_together_are_all_made_again() -> None:
    """They count as one loss, and a later one as another."""
    fleet = fleet_of("a:1", "b:1", losing=["a:1"])
    root = CallContext()
    async with replicated(fleet) as target:
        for _ in range(20):
            await infer(target, root=root)
            if fleet.calls()["a:1"] == 2:
                break
        assert 1 == len(root.lost)
        fleet.now_ns += 1_000_000_000
        fleet.fakes["b:1"].answers["m"] = lose
        with pytest.raises(RemoteError, match="Socket closed"):
            await infer(target, root=root)
        assert 2 == len(root.lost)


@pytest.mark.parametrize("num_responses", [0, 1])
async def test_a_stream_is_begun_again_before_its_first_response_only(num_responses: int) -> None:
    """A client that has seen a response would see it twice."""
    fleet = fleet_of("a:1", "b:1")
    async with replicated(fleet) as target:
        first, second = target.replicas
        first.target = Streaming("a:1", num_responses, lost())  # type: ignore[assignment]
        second.target = Streaming("b:1", 3, None)  # type: ignore[assignment]
        second.num_inflight = 1  # the first is chosen
        responses = target.stream_infer(call(), CallContext())
        if num_responses:
            await anext(responses)
            with pytest.raises(RemoteError, match="Socket closed"):
                await anext(responses)
        else:
            assert 4 == len([one async for one in responses])
        assert 1 - num_responses == target.num_repeated


async def test_every_state_of_a_replica_is_a_series() -> None:
    """That of one that is lost has 0 for serving, and so has a target that is one server and does not answer."""
    fleet = fleet_of("a:1", "b:1")
    async with replicated(fleet) as target:
        catalog = TargetCatalog([target, FakeTarget("alone")])
        registry = CollectorRegistry()
        registry.register(TargetCollector(catalog))
        fleet.tells["b:1"](Health.UNREACHABLE)
        states = ("serving", "unreachable", "ejected")
        for address, expected in (("a:1", [1, 0, 0]), ("b:1", [0, 1, 0])):
            labels = {"target": "model", "endpoint": address}
            found = [registry.get_sample_value("weft_endpoint_state", {**labels, "state": state}) for state in states]
            assert expected == found
        alone = {"target": "alone", "endpoint": "fake:1"}
        for is_there in (False, True):
            catalog.targets["alone"].is_reachable = is_there
            value = registry.get_sample_value("weft_endpoint_state", {**alone, "state": "serving"})
            assert int(is_there) == value
