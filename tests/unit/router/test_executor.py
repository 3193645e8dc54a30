"""What a graph does beside its answers, which are kept cases under ``cases/``: tasks, buffers, headers, defects."""

import asyncio
import contextlib
import gc
import random
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing
from tests.unit.router.graph_cases import World, compiled
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import InvalidArgumentError, RemoteError, WeftError
from weft.base.signature import ModelSignature
from weft.base.tensors import WireTensor
from weft.base.validation import validate
from weft.language import GraphSource
from weft.router.compile import check_graph
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.repository.config import config_of_graph, config_of_signature, message_of, signature_of
from weft.router.repository.serving import missing_call
from weft.router.runtime import Runtime

TO_M, OF_M = 'output_map { key: "Y" value: "M" }', 'input_map { key: "X" value: "M" }'
CHAIN = f"""node {{ name: "root" sequence {{
  step {{ name: "a" model_name: "good" {TO_M} }} step {{ name: "b" model_name: "bad" {OF_M} }} }} }}"""
FORK = """graph: X -> good bad slow
node { name: "root" sequence {
  step { model_name: "good" output_map { key: "Y" value: "good" } }
  step { model_name: "bad" output_map { key: "Y" value: "bad" } }
  step { model_name: "slow" output_map { key: "Y" value: "slow" } } } }"""
MEMBERS = 'step { model_name: "good" } step { model_name: "bad" } step { model_name: "slow" }'


def ensemble(members: str, more: str) -> str:
    return f'node {{ name: "root" ensemble {{ {members} {more} }} }}'


def by_row(kind: str, test: str) -> str:
    """A node of each row, whose first step takes every row."""
    return f"""graph: X -> Y batch 8
    node {{ name: "root" {kind} {{ per_row: true step {{ model_name: "a" {test} }}
      step {{ model_name: "b" {"otherwise: true" if kind == "switch" else ""} }} }} }}"""


async def fail(call: InferCall, context: CallContext) -> Any:
    raise RemoteError("INTERNAL", "boom")


async def hold(call: InferCall, context: CallContext) -> Any:
    await asyncio.Event().wait()


async def break_down(call: InferCall, context: CallContext) -> Any:
    raise ZeroDivisionError


async def test_a_chain_runs_without_a_single_task() -> None:
    """Steps that follow one another are awaited in the caller's task."""
    tasks: list[int] = []

    async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        tasks.append(make.num_other_tasks())
        return {"Y": call.inputs["X"]}

    await make.run(compiled(CHAIN), FakeTarget(good=answer, bad=answer))
    assert [0, 0] == tasks


@pytest.mark.parametrize(
    "text",
    [
        CHAIN,
        by_row("switch", "when: 'inputs.X[0] > 0.0'"),
        by_row("cascade", "accept: 'outputs.Y[0] > 0.0'"),
        "graph: X -> a.Y b.Y\n" + ensemble('step { model_name: "a" } step { model_name: "b" }', ""),
    ],
    ids=["chain", "switch of rows", "cascade of rows", "ensemble by step"],
)
async def test_nothing_is_copied_on_the_way_in_or_out(text: str) -> None:
    """The data of the answer is the very object that the client sent; so is that of each call."""
    plan, target = compiled(text), FakeTarget()
    x = make.tensor(1.0, 2.0, shape=(2, 1)) if "batch" in text else make.tensor(1.0)
    result = await make.run(plan, target, {"X": x})
    assert all(tensor.data is x.data for tensor in result.outputs.values())
    assert all(call.inputs["X"].data is x.data for call in target.calls)


async def test_a_call_carries_what_the_client_sent() -> None:
    """Request id, parameters, priority and headers go to every step; keys, hop-by-hop headers, other inputs do not."""
    target = FakeTarget()
    headers = {
        "x-user-id": "7",
        "user-agent": "grpc-python",
        "grpc-accept-encoding": "gzip",
        "te": "trailers",
        "traceparent": "00-1-2-01",
        "authorization": "Bearer secret",
        "x-api-key": "secret",
    }
    parameters = {"priority": 2, "lang": "de"}
    context = CallContext(headers=headers)
    await make.run(compiled(CHAIN), target, parameters=parameters, context=context, request_id="id-1")
    for call, seen in zip(target.calls, target.contexts, strict=True):
        assert ("id-1", parameters, ["X"]) == (call.request_id, call.parameters, list(call.inputs))
        assert ["Y"] == [output.name for output in call.outputs]
        assert ({"x-user-id": "7", "traceparent": "00-1-2-01"}, None) == (seen.headers, seen.deadline_ns)


async def test_an_executor_serves_many_requests_at_once() -> None:
    """Requests share the compiled graph and nothing else."""
    executor = GraphExecutor(compiled(FORK), Runtime({"model": FakeTarget()}))
    results = await asyncio.gather(*(make.run(executor, inputs={"X": make.tensor(float(i))}) for i in range(50)))
    assert [make.tensor(float(i)) for i in range(50)] == [result.outputs["slow"] for result in results]


@pytest.mark.parametrize(
    "text",
    [
        FORK,
        """node { name: "root" sequence { step { model_name: "bad" dependency: SOFT default { output: "Y" number: 7 }
           fallback { model_name: "spare" } } } }""",
        ensemble(
            'step { model_name: "bad" dependency: SOFT } step { model_name: "b" dependency: SOFT }',
            'quorum: 1 combine { output: "Y" method: SUM }',
        ),
        ensemble(
            'step { model_name: "bad" } step { model_name: "b" dependency: SOFT }',
            'quorum: 1 combine { output: "Y" method: SUM }',
        ),
    ],
    ids=["sequence", "soft step", "soft member", "hard member"],
)
async def test_a_defect_is_raised_as_it_is(text: str) -> None:
    """Only errors that are meant for clients are softened; siblings are cancelled all the same."""
    with pytest.raises(ZeroDivisionError):
        await make.run(compiled(text), FakeTarget(bad=break_down, slow=hold))
    assert 0 == make.num_other_tasks()


async def test_a_late_member_is_awaited(virtual_clock: VirtualClock) -> None:
    """A call that takes its time to go away is over when the answer is given."""

    async def slow_to_leave(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        try:
            await asyncio.sleep(1_000)
        finally:
            await asyncio.sleep(0.003)
        return {}

    members = 'step { model_name: "a" dependency: SOFT } step { model_name: "b" dependency: SOFT }'
    plan = compiled(ensemble(members, 'quorum: 1 straggler_ms: 10 combine { output: "Y" method: SUM }'))
    target = FakeTarget(a=slow_to_leave, b=answering(2))
    assert make.tensor(2) == (await make.run(plan, target)).outputs["Y"]
    assert (["a"], 0, 13.0) == (target.cancelled, target.num_open, virtual_clock.elapsed_ms())


async def test_inputs_without_batch_dimension_do_not_tell_the_rows_of_a_default() -> None:
    """The first input is a vector that belongs to all rows; there are two rows, as the second says."""
    default = {"T": make.tensor(7.0, shape=(1, 1))}
    step = make.step("a", "m", {"IN": "X"}, {"OUT": "T"}, is_soft=True, batched_defaults=default)
    root = make.node("root", SequencePlan, [step], inputs=["V", "X"], outputs=["T"])
    root = replace(root, specs={0: make.spec("V", dims=(5,)), 1: make.spec("X", dims=(1,))})
    inputs = {"V": make.tensor(*range(5)), "X": make.tensor(1, 2, shape=(2, 1))}
    result = await make.run(make.graph(root, max_batch_size=8), FakeTarget(m=failing()), inputs)
    assert make.tensor(7, 7, shape=(2, 1)) == result.outputs["T"]


@pytest.mark.parametrize(("soft", "model"), [("", "guard"), ("dependency: SOFT", None)])
def test_a_graph_without_its_guard_cannot_answer(soft: str, model: str | None) -> None:
    """A HARD guard whose model is not ready keeps the graph from serving; a SOFT one does not."""
    plan = compiled(f"""node {{ name: "root" sequence {{ step {{ model_name: "guard" {TO_M} {soft} }}
      step {{ model_name: "main" after: "guard" }} }} }}""")
    missing = missing_call(plan.root, lambda call: call.model_name != "guard")
    assert model == (missing and missing.call.model_name)


def test_the_time_of_a_guard_counts() -> None:
    """What follows it has the rest of the graph's time: G021 adds the two up."""
    policy = "policy { timeout_ms: 60 }"
    steps = f'step {{ model_name: "guard" {TO_M} {policy} }} step {{ model_name: "main" after: "guard" {policy} }}'
    world = World([f'policy {{ timeout_ms: 100 }} node {{ name: "root" sequence {{ {steps} }} }}'])
    (found,) = check_graph(GraphSource(world.graphs["g"], "g.pbtxt"), world)
    assert ("G021", True) == (found.code, "may take 120 ms one after another" in found.message)


def test_the_signature_says_what_may_be_missing() -> None:
    """In the plan, in the configuration that clients get, in that of a lock file, and back."""
    plan = compiled("graph: X -> V? Y\nmodel m: X -> Y V?\nnode { name: 'root' sequence { step { model_name: 'm' } } }")
    outputs = plan.signature.outputs
    assert [("V", True), ("Y", False)] == [(spec.name, spec.is_optional) for spec in outputs]
    config = config_of_graph(GraphSource('name: "g"', "g.pbtxt", "g", "1"), plan)
    assert "V" == config.parameters["optional_outputs"].string_value
    assert outputs == ModelSignature.from_config(config, "1").outputs
    assert outputs == ModelSignature.from_config(config_of_signature(plan.signature), "1").outputs
    assert outputs == signature_of(message_of("model", plan.signature)).outputs


def test_the_signature_of_a_graph_that_reshapes_has_the_dims_of_the_clients() -> None:
    """Those that the steps see are nobody's affair outside."""
    plan = compiled("""name: "g" platform: "graph"
    input { name: "X" data_type: TYPE_FP32 dims: [ 1, 1 ] reshape { shape: [ 1 ] } }
    output { name: "Y" data_type: TYPE_FP32 dims: [ 1, 1 ] reshape { shape: [ 1 ] } }
    node { name: "root" sequence { step { model_name: "m" } } }""")
    assert [(1, 1), (1, 1)] == [spec.dims for spec in (*plan.signature.inputs, *plan.signature.outputs)]


@pytest.mark.parametrize("parameters", ["", 'parameters { key: "allow_empty_batch" }'])
def test_a_graph_takes_a_batch_of_no_rows_if_it_says_so(parameters: str) -> None:
    """As a model does."""
    plan = compiled(
        f'graph: X -> Y batch 4\nnode {{ name: "root" sequence {{ step {{ model_name: "m" }} }} }}{parameters}'
    )
    call = InferCall("g", inputs={"X": WireTensor("FP32", (0, 1), b"")})
    if parameters:
        assert 0 == validate(call, plan.signature)
    else:
        with pytest.raises(InvalidArgumentError, match="'allow_empty_batch'"):
            validate(call, plan.signature)


@pytest.mark.parametrize(("num_values", "num_calls"), [(3, 1), (300_000, 2)])
async def test_an_answer_larger_than_the_cache_is_not_kept(num_values: int, num_calls: int) -> None:
    """The next request makes a call of its own; a smaller answer is kept."""
    target = FakeTarget()
    text = f"graph: X:FP32:-1 -> Y:FP32:-1\nmodel m: X:FP32:-1 -> Y:FP32:-1\n{one('cache { max_mib: 1 }')}"
    executor = GraphExecutor(compiled(text.replace('"bad"', '"m"')), Runtime({"model": target}))
    for _ in range(2):
        await make.run(executor, inputs={"X": make.tensor(*[1.0] * num_values)})
    assert num_calls == len(target.calls)


async def test_random_draws_follow_the_weights() -> None:
    """Ten thousand draws of a splitter fit its weights (chi-square, 1 in 10,000)."""
    target = FakeTarget()
    steps = 'step { model_name: "a" weight: 3 } step { model_name: "b" weight: 1.5 }'
    runtime = Runtime({"model": target}, generator=random.Random(7))
    executor = GraphExecutor(compiled(f'node {{ name: "root" splitter {{ {steps} }} }}'), runtime)
    for _ in range(10_000):
        await make.run(executor)
    expected = {"a": 10_000 * 3 / 4.5, "b": 10_000 * 1.5 / 4.5}
    counts = target.called()
    assert sum((counts.count(name) - number) ** 2 / number for name, number in expected.items()) < 15.1


class Data(bytearray):
    """Bytes that can be watched."""


RETRY, HEDGE = 'retry { attempts: 3 on: "INTERNAL" }', "hedge { after_ms: 1 max_extra: 2 }"
CACHE, FALLBACK = "cache { ttl_ms: 60000 }", 'fallback { model_name: "bad2" }'
SOFT = 'dependency: SOFT default { output: "Y" number: 7 }'


def one(policy: str = "", more: str = "") -> str:
    return f'node {{ name: "root" sequence {{ step {{ model_name: "bad" {more} policy {{ {policy} }} }} }} }}'


HOLDING = {
    "chain": CHAIN,
    "fork": FORK,
    "average": ensemble(MEMBERS, 'combine { output: "Y" method: AVERAGE }'),
    "first": ensemble(MEMBERS, 'combine { output: "Y" method: FIRST }'),
    "all fail": ensemble(
        'step { model_name: "bad" } step { model_name: "bad2" }', 'combine { output: "Y" method: FIRST }'
    ),
    "soft": one("", SOFT),
    "retry": one(RETRY),
    "hedge": one(HEDGE),
    "hedge that is not needed": one("hedge { after_ms: 60000 }"),
    "cache": one(CACHE),
    "fallback": one("", FALLBACK),
    "all policies": one(f"{RETRY} {HEDGE} {CACHE} max_inflight: 1 timeout_ms: 1000", f"{SOFT} {FALLBACK}"),
}


@pytest.mark.parametrize("ending", ["answered", "failed", "cancelled"])
@pytest.mark.parametrize("graph", HOLDING)
async def test_tensors_are_freed_when_the_request_is_over(virtual_clock: VirtualClock, graph: str, ending: str) -> None:
    """By counting references alone: an error that keeps its frames alive would keep every tensor of the request.

    What was tried in vain is freed with the rest; a cache keeps the answer, and not what it was made of.
    """
    scripts: dict[str, Any] = {
        "answered": {"bad": answering(1.0)},
        "failed": {"bad": fail, "bad2": fail, "slow": hold},
        "cancelled": {"bad": hold},
    }

    target = FakeTarget(**scripts[ending])
    executor = GraphExecutor(compiled(HOLDING[graph]), Runtime({"model": target}, clock_ns=virtual_clock))
    gc.disable()
    try:
        data = Data(4)
        watched = weakref.ref(data)
        request = asyncio.create_task(make.run(executor, inputs={"X": WireTensor("FP32", (1,), data)}))  # type: ignore[arg-type]
        del data
        if ending == "cancelled":
            await asyncio.sleep(0.005)
            request.cancel()
        with contextlib.suppress(WeftError, asyncio.CancelledError):
            await request
        del request
        target.calls.clear()
        await asyncio.sleep(0.001)  # the loop lets go of the tasks that have ended
        assert watched() is None
    finally:
        gc.enable()


async def test_a_round_of_a_loop_does_not_hold_the_tensors_of_the_one_before() -> None:
    """They are freed before the first step of the next round."""
    watched: list[weakref.ref[Data]] = []
    freed: list[bool] = []

    async def good(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        target.calls.clear()
        freed.extend(one() is None for one in watched)
        data = Data(4)
        watched.append(weakref.ref(data))
        return {"Y": WireTensor("FP32", (1,), data)}  # type: ignore[arg-type]

    again = 'loop { while: \'outputs.Y[0] > 0.0\' max_iterations: 2 carry { key: "Y" value: "X" } } } }'
    target = FakeTarget(good=good, bad=answering(1.0))
    await make.run(compiled(CHAIN.removesuffix("} }") + again), target)
    assert [True] == freed
