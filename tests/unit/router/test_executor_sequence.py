"""Sequences: order, fan-out, failure, cancellation, and what a call carries."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering
from tests.unit.router.text_graphs import DEFAULT, compiled, sequence, y

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InternalError, InvalidArgumentError, RemoteError, ResourceExhaustedError
from weft.base.tensors import WireTensor, decode
from weft.language.dialects import TRITON
from weft.language.plan import GraphPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.runtime import Runtime

SEQUENCE = SequencePlan


def chain(length: int = 3, **options: Any) -> GraphPlan:
    """X -> m0 -> m1 -> ... -> Y."""
    tensors = ["X", *(f"t{i}" for i in range(length - 1)), "Y"]
    steps = [make.step(f"s{i}", f"m{i}", {"IN": tensors[i]}, {"OUT": tensors[i + 1]}) for i in range(length)]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]), **options)


def diamond() -> GraphPlan:
    """X -> a -> (b, c) -> d -> Y."""
    steps = [
        make.step("a", "ma", {"IN": "X"}, {"OUT": "A"}),
        make.step("b", "mb", {"IN": "A"}, {"OUT": "B"}),
        make.step("c", "mc", {"IN": "A"}, {"OUT": "C"}),
        make.step("d", "md", {"L": "B", "R": "C"}, {"OUT": "Y"}),
    ]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


async def test_a_chain_runs_in_order_without_a_single_task() -> None:
    """Steps that follow one another are awaited in the caller's task."""
    tasks: list[int] = []

    async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        tasks.append(make.num_other_tasks())
        return {"OUT": call.inputs["IN"]}

    target = FakeTarget(m0=answer, m1=answer, m2=answer)
    await make.run(chain(), target)
    assert ["m0", "m1", "m2"] == target.called()
    assert [0, 0, 0] == tasks


async def test_bytes_pass_through_undecoded() -> None:
    """The data of the answer is the very object that the client sent, through ten steps."""
    data = b"\x00" * 4
    result = await make.run(chain(10), FakeTarget(), {"X": WireTensor("FP32", (1,), data)})
    assert result.outputs["Y"].data is data


async def test_independent_steps_run_at_once() -> None:
    """Both steps after a fork are called before either has answered."""
    both = asyncio.Barrier(2)

    async def meet(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        await both.wait()
        return {"OUT": call.inputs["IN"]}

    target = FakeTarget(mb=meet, mc=meet)
    async with asyncio.timeout(5):
        result = await make.run(diamond(), target)
    assert ["ma", "mb", "mc", "md"] == target.called()
    assert {"Y"} == set(result.outputs)
    assert make.num_other_tasks() == 0


async def test_a_step_starts_as_soon_as_its_own_inputs_exist() -> None:
    """The follower of a quick branch does not wait for the slow branch."""
    released = asyncio.Event()

    async def slow(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        await released.wait()
        return {"OUT": call.inputs["IN"]}

    async def follower(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        released.set()
        return {"OUT": call.inputs["IN"]}

    steps = [
        make.step("slow", "slow", {"IN": "X"}, {"OUT": "S"}),
        make.step("quick", "quick", {"IN": "X"}, {"OUT": "Q"}),
        make.step("after", "follower", {"IN": "Q"}, {"OUT": "Y"}),
    ]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y", "S"]))
    async with asyncio.timeout(5):
        result = await make.run(plan, FakeTarget(slow=slow, follower=follower))
    assert {"Y", "S"} == set(result.outputs)


async def test_the_first_failure_cancels_the_siblings() -> None:
    """The sibling in flight is cancelled and awaited, later steps do not run, no task is left."""
    is_waiting = asyncio.Event()

    async def wait_for_ever(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        is_waiting.set()
        await asyncio.Event().wait()
        return {}

    async def fail(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        await is_waiting.wait()
        raise RemoteError("UNAVAILABLE", "gone")

    target = FakeTarget(mb=wait_for_ever, mc=fail)
    context = CallContext()
    with pytest.raises(RemoteError, match="root/c -> mc@1: gone"):
        await make.run(diamond(), target, context=context)
    assert ["mb"] == target.cancelled
    assert "md" not in target.called()
    assert make.num_other_tasks() == 0
    assert [("x-graph-path", "root.a;b~;c!")] == context.trailing_metadata


async def test_cancelling_a_lone_step_reaches_its_call() -> None:
    """A cancel passes through a step that is awaited inline, and the path says where it came."""
    is_called = asyncio.Event()

    async def wait_for_ever(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        is_called.set()
        await asyncio.Event().wait()
        return {}

    target = FakeTarget(m1=wait_for_ever)
    context = CallContext()
    request = asyncio.create_task(make.run(chain(), target, context=context))
    await is_called.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert ["m1"] == target.cancelled
    assert [("x-graph-path", "root.s0;s1~")] == context.trailing_metadata


async def test_a_call_carries_what_the_client_sent() -> None:
    """Request id, parameters, priority and headers go to every step; keys, hop-by-hop headers, other inputs do not."""
    target = FakeTarget()
    context = CallContext(
        headers={
            "x-user-id": "7",
            "user-agent": "grpc-python",
            "grpc-accept-encoding": "gzip",
            "te": "trailers",
            "traceparent": "00-1-2-01",
            "authorization": "Bearer secret",
            "x-api-key": "secret",
        }
    )
    parameters = {"priority": 2, "lang": "de"}
    await make.run(chain(2), target, parameters=parameters, context=context, request_id="id-1")
    for call, seen in zip(target.calls, target.contexts, strict=True):
        assert "id-1" == call.request_id
        assert parameters == call.parameters
        assert ["IN"] == list(call.inputs)
        assert ["OUT"] == [output.name for output in call.outputs]
        assert {"x-user-id": "7", "traceparent": "00-1-2-01"} == seen.headers


async def test_the_deadline_is_the_earliest_of_client_graph_node_and_step() -> None:
    """Each limit only ever shortens the time that is left."""
    inner = make.node(
        "inner",
        SEQUENCE,
        [
            make.step("plain", "plain", {"IN": "X"}, {"OUT": "A"}),
            make.step("short", "short", {"IN": "A"}, {"OUT": "Y"}, timeout_ms=1_000),
            make.step("long", "long", {"IN": "A"}, {"OUT": "Z"}, timeout_ms=90_000),
        ],
        inputs=["X"],
        outputs=["Y", "Z"],
        timeout_ms=10_000,
    )
    outer = [
        make.step("first", "first", {"IN": "X"}, {"OUT": "A"}),
        make.step("sub", inner, {"X": "A"}, {"Y": "Y", "Z": "Z"}),
    ]
    plan = make.graph(make.node("root", SEQUENCE, outer, inputs=["X"], outputs=["Y", "Z"]), timeout_ms=50_000)
    target = FakeTarget()
    before = time.monotonic_ns()
    await make.run(plan, target, context=CallContext(deadline_ns=before + 1_000 * 10**9))
    left_s = {c.model_name: (k.deadline_ns - before) / 1e9 for c, k in zip(target.calls, target.contexts, strict=True)}
    assert {"first": 50, "plain": 10, "short": 1, "long": 10} == {model: int(left) for model, left in left_s.items()}

    target = FakeTarget()
    await make.run(plan, target, context=CallContext(deadline_ns=before + 10**9 // 2))
    assert {before + 10**9 // 2} == {context.deadline_ns for context in target.contexts}


async def test_without_any_limit_there_is_no_deadline() -> None:
    """A call has no deadline where neither client nor graph set one."""
    target = FakeTarget()
    await make.run(chain(1), target)
    assert [None] == [context.deadline_ns for context in target.contexts]


async def test_an_error_keeps_its_code_and_tells_its_place() -> None:
    """Graph, version, step, model and version precede the original message; the retry hint stays."""

    async def fail(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        raise RemoteError("RESOURCE_EXHAUSTED", "queue is full", retry_after_ms=70)

    with pytest.raises(RemoteError) as caught:
        await make.run(chain(), FakeTarget(m1=fail))
    assert "g/1: root/s1 -> m1@1: queue is full" == caught.value.message
    assert "RESOURCE_EXHAUSTED" == caught.value.code
    assert 70 == caught.value.retry_after_ms


async def test_an_ensemble_error_starts_as_tritons_does() -> None:
    """`platform: "ensemble"` keeps the prefix that clients look for, and adds the step."""

    async def fail(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        raise ResourceExhaustedError("Exceeds maximum queue size", retry_after_ms=5)

    with pytest.raises(ResourceExhaustedError) as caught:
        await make.run(chain(name="pipe", dialect=TRITON), FakeTarget(m0=fail))
    assert "in ensemble 'pipe', root/s0 -> m0@1: Exceeds maximum queue size" == caught.value.message
    assert 5 == caught.value.retry_after_ms


async def test_a_missing_output_is_an_internal_error_that_names_it() -> None:
    """An answer without a requested output fails; step, output and model are named."""

    async def forget(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return {"OTHER": call.inputs["IN"]}

    with pytest.raises(InternalError, match=r"root/s1 -> m1@1: output 'OUT' of step 's1' is missing.*has OTHER"):
        await make.run(chain(), FakeTarget(m1=forget))


async def test_an_unexpected_exception_is_passed_on_as_it_is() -> None:
    """What is no error of ours is the server edge's to hide; siblings are cancelled all the same."""

    async def fail(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await make.run(diamond(), FakeTarget(mc=fail))
    assert make.num_other_tasks() == 0


async def test_an_absent_optional_input_is_left_out_of_the_call() -> None:
    """A step still runs without it; an output that only repeats it is left out of the answer."""
    steps = [make.step("s", "m", {"IN": "X", "EXTRA": "O"}, {"OUT": "Y"})]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X", "O"], outputs=["Y", "O"]))
    target = FakeTarget()
    result = await make.run(plan, target, {"X": make.tensor(1.0)})
    assert ["IN"] == list(target.calls[0].inputs)
    assert ["Y"] == list(result.outputs)


async def test_requested_outputs_come_alone_and_in_the_order_asked_for() -> None:
    """Without a request, all outputs come in declared order."""
    steps = [make.step("s", "m", {"IN": "X"}, {"A": "A", "B": "B", "C": "C"})]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["A", "B", "C"]))
    assert ["C", "A"] == list((await make.run(plan, FakeTarget(), outputs=["C", "A"])).outputs)
    assert ["A", "B", "C"] == list((await make.run(plan, FakeTarget())).outputs)


async def test_response_parameters_merge_and_the_later_step_wins() -> None:
    """Each step may add parameters to the answer."""

    def answering(**parameters: Any) -> Any:
        async def answer(call: InferCall, context: CallContext) -> InferResult:
            return InferResult(call.model_name, "1", "", parameters, {"OUT": call.inputs["IN"]})

        return answer

    target = FakeTarget(m0=answering(a=1, b=1), m2=answering(b=2))
    result = await make.run(chain(), target)
    assert {"a": 1, "b": 2} == result.parameters


async def test_a_batching_graph_gives_a_single_row_to_a_model_without_batching() -> None:
    """The leading 1 is stripped for the call and put back on its answer; two rows are refused by name."""
    action = make.call_plan("m", ["IN"], ["OUT"], max_batch_size=0)
    steps = [make.step("s", action, {"IN": "X"}, {"OUT": "Y"})]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]), max_batch_size=8)
    target = FakeTarget()
    result = await make.run(plan, target, {"X": make.tensor(1, 2, 3, shape=(1, 3))})
    assert (3,) == target.calls[0].inputs["IN"].shape
    assert (1, 3) == result.outputs["Y"].shape
    with pytest.raises(InvalidArgumentError, match=r"g/1: root/s -> m@1: input 'IN' has batch size 2, but model 'm'"):
        await make.run(plan, target, {"X": make.tensor(1, 2, 3, 4, shape=(2, 2))})


async def test_a_graph_without_batching_uses_a_batching_model() -> None:
    """A leading 1 is added for the call and taken off its answer."""
    action = make.call_plan("m", ["IN"], ["OUT"], max_batch_size=4)
    steps = [make.step("s", action, {"IN": "X"}, {"OUT": "Y"})]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))
    target = FakeTarget()
    result = await make.run(plan, target, {"X": make.tensor(1, 2, 3)})
    assert (1, 3) == target.calls[0].inputs["IN"].shape
    assert (3,) == result.outputs["Y"].shape


async def test_a_nested_node_runs_in_its_own_frame() -> None:
    """Tensor names inside a node do not touch those outside; the path shows the node."""
    inner = make.node(
        "inner",
        SEQUENCE,
        [make.step("a", "ma", {"IN": "P"}, {"OUT": "Q"}), make.step("b", "mb", {"IN": "Q"}, {"OUT": "R"})],
        inputs=["P"],
        outputs={"RESULT": "R"},
    )
    outer = [
        make.step("pre", "pre", {"IN": "X"}, {"OUT": "Q"}),
        make.step("sub", inner, {"P": "Q"}, {"RESULT": "S"}),
        make.step("post", "post", {"IN": "S"}, {"OUT": "Y"}),
    ]
    context = CallContext()
    target = FakeTarget()
    plan = make.graph(make.node("root", SEQUENCE, outer, inputs=["X"], outputs=["Y"]))
    result = await make.run(plan, target, {"X": make.tensor(4.0)}, context=context)
    assert make.tensor(4.0) == result.outputs["Y"]
    assert ["pre", "ma", "mb", "post"] == target.called()
    assert [("x-graph-path", "root.pre;sub=inner(a;b);post")] == context.trailing_metadata


async def test_an_executor_serves_many_requests_at_once() -> None:
    """Requests share the compiled graph and nothing else."""
    executor = GraphExecutor(diamond(), Runtime({"model": FakeTarget()}))
    results = await asyncio.gather(*(make.run(executor, inputs={"X": make.tensor(float(i))}) for i in range(50)))
    assert [make.tensor(float(i)) for i in range(50)] == [result.outputs["Y"] for result in results]


async def test_steps_of_an_ordered_sequence_may_give_one_tensor_anew() -> None:
    """Each reads what the nearest step before it gave, conditions too, and the answer is the last; also in a node."""
    again = 'output_map { key: "Y" value: "X" }'
    steps = " ".join(f'step {{ name: "{name}" model_name: "{name}" {again} }}' for name in ("one", "two"))
    last = f"""step {{ name: "last" model_name: "last" when: 'inputs.X[0] == 2.0' {DEFAULT} }}"""
    for plan in (
        compiled(sequence(steps, last, "ordered: true")),
        compiled(sequence('step { node: "n" }') + sequence(steps, last, "ordered: true", name="n")),
    ):
        target = FakeTarget(one=answering(1), two=answering(2), last=answering(3))
        result = await make.run(plan, target)
        read = [float(decode(call.inputs["X"])[0]) for call in target.calls[1:]]
        assert ([1.0, 2.0], 3.0) == (read, y(result))


async def test_a_node_that_gives_anew_what_it_reads_by_name_is_no_cycle() -> None:
    """`input_map` from X to itself in its first step is the node's input, though its last step gives X as well."""
    maps = 'input_map { key: "X" value: "%s" } output_map { key: "Y" value: "%s" }'
    first = f'step {{ name: "first" model_name: "first" {maps % ("X", "M")} }}'
    last = f'step {{ name: "last" model_name: "last" {maps % ("M", "X")} }}'
    outer = 'step { node: "n" output_map { key: "X" value: "Y" } }'
    plan = compiled(sequence(outer) + sequence(first, last, name="n"))
    target = FakeTarget(last=answering(5))
    assert (5.0, ["first", "last"]) == (y(await make.run(plan, target)), target.called())
