"""Requests whose prompt another replica computes: which they are, what each replica is told, how the lease ends."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.targets.test_replicated import Fleet, lost, refusal, replicated

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.tensors import decode, encode
from weft.router.target import TargetModel
from weft.router.targets.replicated import ReplicatedTarget
from weft.v2.protocol.handover import signed_source, verified_source
from weft_protos.model_config_pb2 import ModelConfig

KEY = "key"


class Replica:
    """A language model that counts to 2, behind tokens that it is given, and keeps its calls.

    It raises ``fails``, if that is set; with the role ``prefill`` it hands over where asked, and waits for its end.
    """

    def __init__(self, address: str, role: str) -> None:
        self.name = self.address = address
        self.role = role
        self.calls: list[InferCall] = []
        self.fails: WeftError | None = None
        self.is_ended = asyncio.Event()

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        self.calls.append(call)
        if self.fails is not None:
            raise self.fails
        resumed = call.inputs.get("resume_token_ids")
        start = 0 if resumed is None else len(decode(resumed))
        is_handed_over = self.role == "prefill" and call.parameters.get("kv_lease") is True
        more = {"kv_handover": "ENGINE.LEASE"} if is_handed_over else {}
        try:
            for token in range(start, 3):
                outputs = {"output_ids": encode(np.array([token], np.int32))}
                yield InferResult("m", "1", "", more, outputs, is_final=token == 2)
                if is_handed_over:
                    await asyncio.Event().wait()
        finally:
            self.is_ended.set()

    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        config = ModelConfig(name="m")
        config.parameters["role"].string_value = self.role
        config.parameters["prefill_min_tokens"].string_value = "10"
        signature = replace(make.signature("m"), migration_limit=3, can_repeat=True, is_decoupled=True)
        return [TargetModel(signature, True, config)]

    async def close(self) -> None:
        pass


def fleet_of(*roles: str) -> Fleet:
    fleet = Fleet([f"{role}{number}:1" for number, role in enumerate(roles)])

    def connect(address: str) -> Any:
        fleet.fakes[address] = Replica(address, address.rstrip(":0123456789"))
        return fleet.fakes[address]

    fleet.connect = connect  # type: ignore[method-assign]
    return fleet


def call(num_tokens: int = 10, *, is_streamed: bool = True, **parameters: Any) -> InferCall:
    inputs = {"input_ids": encode(np.zeros(num_tokens, np.int32)), "stream": encode(np.array([is_streamed]))}
    return InferCall("m", parameters=parameters, inputs=inputs)


async def tokens(target: ReplicatedTarget, one: InferCall) -> list[int]:
    found = []
    async for result in target.stream_infer(one, CallContext()):
        assert not result.parameters, "clients are told nothing of leases"
        found += decode(result.outputs["output_ids"]).tolist()
    return found


async def test_a_long_prompt_goes_to_the_replica_for_prompts() -> None:
    """It is asked to hand over; the other one gets the token and the signed source; then the lease ends."""
    fleet = fleet_of("prefill", "decode")
    prefill, decoder = "prefill0:1", "decode1:1"
    async with replicated(fleet, mesh_key=KEY) as target:
        assert [0, 1, 2] == await tokens(target, call())
        (first,), (second,) = (fleet.fakes[name].calls for name in (prefill, decoder))
        assert (True, None) == (first.parameters.get("kv_lease"), first.parameters.get("kv_source"))
        assert [0] == decode(second.inputs["resume_token_ids"]).tolist()
        assert (prefill, "ENGINE.LEASE") == verified_source(KEY, str(second.parameters["kv_source"]))
        assert "kv_lease" not in second.parameters
        assert fleet.fakes[prefill].is_ended.is_set()
        assert [0, 0] == [one.num_inflight for one in target.replicas]


@pytest.mark.parametrize(
    ("roles", "one", "key", "expected"),
    [
        (("prefill", "decode"), call(9), KEY, "decode1:1"),
        (("prefill", "decode"), call(is_streamed=False), KEY, "decode1:1"),
        (("prefill", "decode"), call(sequence_id=7, sequence_start=True), KEY, "decode1:1"),
        (("prefill", "decode"), call(), "", "decode1:1"),
        (("prefill", "prefill"), call(), KEY, "prefill"),
        (("both", "both"), call(), KEY, "both"),
    ],
    ids=["short", "no stream", "of a sequence", "no key", "none to go on", "no roles"],
)
async def test_others_are_answered_as_a_whole(roles: tuple[str, ...], one: InferCall, key: str, expected: str) -> None:
    """By one replica, and not by one that is for prompts as long as there is another."""
    fleet = fleet_of(*roles)
    async with replicated(fleet, mesh_key=key) as target:
        assert [0, 1, 2] == await tokens(target, one)
        ((name, (sent,)),) = [(name, fake.calls) for name, fake in fleet.fakes.items() if fake.calls]
        assert name.startswith(expected)
        assert {"kv_lease", "kv_source"}.isdisjoint(sent.parameters)


async def test_a_replica_with_many_prompts_gets_no_more() -> None:
    """The others then compute theirs."""
    fleet = fleet_of("prefill", "decode")
    async with replicated(fleet, mesh_key=KEY) as target:
        target.replicas[0].num_inflight = 8
        assert [0, 1, 2] == await tokens(target, call())
        assert [] == fleet.fakes["prefill0:1"].calls


async def test_of_two_for_prompts_the_one_with_room_gets_them() -> None:
    """Whichever the balancing rule prefers."""
    fleet = fleet_of("prefill", "prefill", "decode")
    async with replicated(fleet, mesh_key=KEY, policy="prefix") as target:
        target.replicas[0].num_inflight = 8
        for size in range(300, 600, 100):
            assert [0, 1, 2] == await tokens(target, call(size))
        assert [0, 3] == [len(fleet.fakes[f"prefill{number}:1"].calls) for number in range(2)]


@pytest.mark.parametrize("fault", [lost, refusal])
@pytest.mark.parametrize("failing", ["prefill0:1", "decode1:1"])
async def test_a_fault_of_either_costs_no_stream(fault: Any, failing: str) -> None:
    """Of the one, another replica computes the prompt; of the other, a third goes on, which is told no source."""
    fleet = fleet_of("prefill", "decode", "decode")
    async with replicated(fleet, mesh_key=KEY) as target:
        fleet.fakes[failing].fails = fault()
        if failing == "decode1:1":
            target.replicas[2].num_inflight = 1  # the one that fails is chosen
        assert [0, 1, 2] == await tokens(target, call())
        last = next(
            fake.calls[-1]
            for name, fake in fleet.fakes.items()
            if name != failing and fake.role == "decode" and fake.calls
        )
        assert "kv_source" not in last.parameters


async def test_a_client_that_leaves_ends_the_lease() -> None:
    """At once, also before the other replica has answered."""
    fleet = fleet_of("prefill", "decode")
    async with replicated(fleet, mesh_key=KEY) as target:
        results = target.stream_infer(call(), CallContext())
        await anext(results)
        await results.aclose()
        assert fleet.fakes["prefill0:1"].is_ended.is_set()
        assert 0 == target.replicas[0].num_inflight


@pytest.mark.parametrize("text", ["", "a", "a b c", "a b", f"{signed_source('other', 'a', 'b')}", "ä b ö"])
def test_a_source_that_the_mesh_has_not_signed_is_refused(text: str) -> None:
    """Else a client could have wrong blocks fetched; without a key nothing is right."""
    for key in (KEY, ""):
        with pytest.raises(InvalidArgumentError, match="not signed with the key of this mesh"):
            verified_source(key, text)
    with pytest.raises(InvalidArgumentError):
        verified_source("", signed_source("", "a", "b"))
