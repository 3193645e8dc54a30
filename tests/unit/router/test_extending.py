"""The router's examples of docs/extending.md run as they stand there."""

import argparse
import asyncio
import random

import pytest
from tests.unit.docs.test_extending import blocks, module
from tests.unit.router import make
from tests.unit.router.extended_proto import FileProto, add_field, add_message, add_value, messages
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn
from tests.unit.router.graph_cases import compiled
from tests.unit.router.targets.test_replicated import Fleet, replicated
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.language import GraphError
from weft.language.bandit_algorithms import ALGORITHMS
from weft.language.description import policy_texts
from weft.language.syntax import parse
from weft.router.arguments import add_arguments
from weft.router.bandits.store import BanditStore
from weft.router.combine import METHODS
from weft.router.executor import GraphExecutor
from weft.router.operators import splitter
from weft.router.operators.ensemble import checks as ensemble_checks
from weft.router.policies import POLICIES
from weft.router.runtime import Runtime
from weft.router.targets import balancing


async def test_a_combine_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with the method is checked, compiled, described and run; a field without effect is refused."""
    (code,), (line,) = blocks("A combine method", "python"), blocks("A combine method", "pbtxt")
    proto = messages("ranging", lambda file: add_value(file, "Combine", "Method", "RANGE"))
    monkeypatch.setattr(parse, "pb", proto)
    monkeypatch.setattr(ensemble_checks, "pb", proto)
    monkeypatch.setitem(METHODS, "RANGE", module(code, "range").RANGE)
    combine = line.replace("SPREAD", "Y").replace("SCORE", "Y")
    steps = 'step { name: "a" model_name: "a" } step { name: "b" model_name: "b" }'
    nodes = f'node {{ name: "root" ensemble {{ {steps} {combine} }} }}'
    plan = compiled(nodes)
    assert ("Y: RANGE",) == plan.root.describe().exit.notes
    result = await make.run(plan, FakeTarget(a=answering(4.5), b=answering(7)))
    assert make.tensor(2.5) == result.outputs["Y"]
    with pytest.raises(GraphError, match="'weighted' has no effect with RANGE; it belongs to: AVERAGE or SUM or VOTE"):
        compiled(nodes.replace("method:", "weighted: true method:"))


async def test_a_balancing_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line takes it by its name, and the calls of a target go where it says."""
    (code,) = blocks("A balancing policy", "python")
    monkeypatch.setitem(balancing.POLICIES, "pack", module(code, "pack").PACK)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert " pack," in parser.format_help()
    ((name, policy),) = parser.parse_args(["--target-policy=model=pack"]).target_policy
    fleet = Fleet(["b:1", "a:1", "c:1"])
    async with replicated(fleet, policy.text) as target:
        await target.infer(InferCall("m"), CallContext())
        next(replica for replica in target.replicas if replica.address == "a:1").num_inflight = 4
        await target.infer(InferCall("m"), CallContext())
    assert ("model", {"a:1": 1, "b:1": 1}) == (name, fleet.calls())


async def test_a_bandit_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A splitter compiled with it is described, chooses by it, and learns from feedback."""
    (code,) = blocks("A bandit algorithm", "python")
    proto = messages("softmax", lambda file: add_value(file, "Bandit", "Algorithm", "SOFTMAX"))
    monkeypatch.setattr(parse, "pb", proto)
    monkeypatch.setattr(splitter, "pb", proto)
    monkeypatch.setitem(ALGORITHMS, "SOFTMAX", module(code, "softmax").SOFTMAX)
    steps = 'step { name: "a" model_name: "a" } step { name: "b" model_name: "b" }'
    plan = compiled(f'node {{ name: "root" splitter {{ bandit {{ algorithm: SOFTMAX epsilon: 0.05 }} {steps} }} }}')
    assert ("SOFTMAX, epsilon 0.05",) == plan.root.describe().entry.notes
    store = BanditStore(random.Random(1))
    target = FakeTarget(a=answering(1), b=answering(2))
    executor = GraphExecutor(plan, Runtime({"model": target}, bandits=store))
    for number in range(100):
        result = await make.run(executor, request_id=str(number))
        store.reward_request("g", str(number), float(result.outputs["Y"] == make.tensor(2)))
    assert [call.model_name for call in target.calls].count("b") > 80


def breaker(file: FileProto) -> None:
    """Adds the example's policy to ``graph.proto``."""
    add_message(file, "Breaker", "failures", "open_ms")
    add_field(file, "Policy", "breaker", 7, "Breaker")


async def test_a_step_policy(monkeypatch: pytest.MonkeyPatch, virtual_clock: VirtualClock) -> None:
    """A graph with it is checked, described and run: after two failures the model is left alone for a second."""
    (code,), (line,) = blocks("A step policy", "python"), blocks("A step policy", "pbtxt")
    monkeypatch.setattr(parse, "pb", messages("breaking", breaker))
    monkeypatch.setitem(POLICIES, "breaker", module(code, "breaker").BreakerPolicy())
    step = f'step {{ name: "a" model_name: "a" {line} }}'
    plan = compiled(f'node {{ name: "root" sequence {{ {step} }} }}')
    assert ["open for 1000 ms after 2 failures"] == policy_texts(plan.root.steps[0])
    target = FakeTarget(a=in_turn(failing(), failing(), answering(5)))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    executor = GraphExecutor(plan, runtime)
    for expected in ("gone", "gone", "it failed 2 times in a row and was not called"):
        with pytest.raises(WeftError, match=expected):
            await make.run(executor)
    await asyncio.sleep(1)
    assert make.tensor(5) == (await make.run(executor)).outputs["Y"]
    assert (3, 1) == (len(target.calls), next(iter(runtime.step_counters)).events["breaker_refused"])
    with pytest.raises(GraphError, match="'breaker' has no 'open_ms'; give the time without calls"):
        compiled(f'node {{ name: "root" sequence {{ {step.replace("open_ms: 1000", "")} }} }}')
