"""Requests that name outputs, from the message to the answer: names of every kind, in graphs of every shape."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.messages import call_from_request
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext
from weft.base.errors import InternalError, InvalidArgumentError, UnsupportedError
from weft.base.tensors import decode
from weft.language.pruning import pruned
from weft.router.core import RouterCore
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.requests import MAX_SELECTIONS
from weft.router.runtime import Runtime
from weft_protos import grpc_service_pb2 as pb

TENSOR = "data_type: TYPE_FP32 dims: [ 2 ]"
#: X -> a -> c; b aside, with an output of its own; d, which is skipped; a shadow of X.
MANY = f"""name: "many" platform: "graph" max_batch_size: 4
input [ {{ name: "X" {TENSOR} }} ]
output [ {{ name: "C" {TENSOR} }}, {{ name: "B" {TENSOR} }}, {{ name: "D" {TENSOR} }} ]
node {{ name: "root" sequence {{
  step {{ name: "a" model_name: "ma" output_map {{ key: "Y" value: "A" }} }}
  step {{ name: "b" model_name: "mb" output_map {{ key: "Y" value: "B" }} }}
  step {{ name: "c" model_name: "mc" input_map {{ key: "X" value: "A" }} output_map {{ key: "Y" value: "C" }} }}
  step {{ name: "d" model_name: "md" output_map {{ key: "Y" value: "D" }} when: 'get(parameters, "d", false)'
         default {{ output: "D" number: [ 7, 7 ] }} }}
  step {{ name: "e" model_name: "me" shadow {{ percent: 100 }} }} }} }}
"""
#: The graph above in a step, a loop in another, a cascade that goes row by row in a third.
NESTED = f"""name: "nested" platform: "graph" max_batch_size: 4
input [ {{ name: "X" {TENSOR} }} ]
output [ {{ name: "Y" {TENSOR} }} ]
import {{ graph: "many" as: "inner" }}
node {{ name: "root" sequence {{
  step {{ name: "sub" graph: "inner" output_map {{ key: "C" value: "S" }} }}
  step {{ name: "round" node: "again" input_map {{ key: "X" value: "S" }} output_map {{ key: "Y" value: "R" }} }}
  step {{ name: "row" node: "rows" input_map {{ key: "X" value: "R" }} }} }} }}
node {{ name: "again" sequence {{ step {{ name: "l" model_name: "ml" }}
  loop {{ while: 'max(outputs.Y) < 100.0' max_iterations: 3 carry {{ key: "Y" value: "X" }} }} }} }}
node {{ name: "rows" cascade {{ per_row: true
  step {{ name: "p" model_name: "mp" accept: 'outputs.Y[0] > 10.0' }} step {{ name: "q" model_name: "mq" }} }} }}
"""


@dataclass
class RouterOfTarget:
    """A running router and its target."""

    core: RouterCore
    target: FakeTarget


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[RouterOfTarget]:
    """A router with both graphs; every model gives its input, which `ml` adds one to."""

    async def add_one(call: Any, context: CallContext) -> dict[str, Any]:
        x = call.inputs["X"]
        return {"Y": make.tensor(*(value + 1 for value in memoryview(x.data).cast("f")), shape=x.shape)}

    target = FakeTarget(ml=add_one)
    make.serve(target, "ma", "mb", "mc", "md", "me", "ml", "mp", "mq")
    make.write(tmp_path, MANY, "many")
    make.write(tmp_path, NESTED, "nested")
    async with make.started(tmp_path, target) as started:
        assert started.core.is_ready(), started.core.index(ready_only=False)
        yield RouterOfTarget(started.core, target)


def request(graph: str, outputs: Sequence[str]) -> pb.ModelInferRequest:
    """A message with two rows, 20 and 1."""
    message = pb.ModelInferRequest(
        model_name=graph, id="r", raw_input_contents=[make.tensor(20, 20, 1, 1, shape=(2, 2)).data]
    )
    message.inputs.add(name="X", datatype="FP32", shape=[2, 2])
    for name in outputs:
        message.outputs.add(name=name)
    return message


async def firsts(core: RouterCore, graph: str, *outputs: str) -> dict[str, list[float]]:
    """The first element of each row of each output."""
    result = await core.infer(call_from_request(request(graph, outputs)), CallContext())
    return {name: list(memoryview(tensor.data).cast("f"))[::2] for name, tensor in result.outputs.items()}


@pytest.mark.parametrize(
    ("outputs", "models", "expected"),
    [
        ((), "a b c", {"C": [20, 1], "B": [20, 1], "D": [7, 7]}),
        (("B",), "b", {"B": [20, 1]}),
        (("C",), "a c", {"C": [20, 1]}),
        (("B", "a/Y"), "a b", {"B": [20, 1], "a/Y": [20, 1]}),
        (("D",), "", {"D": [7, 7]}),
        (("d/Y",), "", {}),
        (("d/Y", "D"), "", {"D": [7, 7]}),
    ],
)
async def test_only_what_is_asked_for_runs(
    router: RouterOfTarget, outputs: tuple[str, ...], models: str, expected: dict[str, Any]
) -> None:
    """Beside the shadow, which reads the graph's input alone; a skipped step has its default, and no tensor."""
    assert expected == await firsts(router.core, "many", *outputs)
    while router.core._runtime.shadows.num_inflight:  # noqa: ASYNC110  # nobody else waits for a shadow
        await asyncio.sleep(0)
    assert sorted([f"m{name}" for name in models.split()] + ["me"]) == sorted(router.target.called())


async def test_tensors_within_a_nested_graph_a_loop_and_rows_can_be_asked_for(router: RouterOfTarget) -> None:
    """A loop gives those of its last round, a step of a cascade those of the rows that it was given."""
    expected = {"sub/root/a/Y": [20, 1], "round/again/l/Y": [23, 4], "row/rows[p]/Y": [23, 4], "row/rows[q]/Y": [4]}
    assert expected == await firsts(router.core, "nested", *expected)


@pytest.mark.parametrize(
    "name", ["", "/", "nobody", "a", "A", "a/", "/Y", "a/X", "e/Y", "root/a/Y", "C/", "C ", "x/" * 500]
)
async def test_an_unknown_name_is_refused(router: RouterOfTarget, name: str) -> None:
    """Also beside a good one, and before anything runs; the message stays short."""
    for outputs in ([name], ["C", name], ["a/Y", name]):
        with pytest.raises(InvalidArgumentError, match=r"^\[request id: r\] unexpected inference output") as caught:
            await firsts(router.core, "many", *outputs)
        assert len(caught.value.message) < 1_000
    assert [] == router.target.calls


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sub/root/a/YY", "did you mean 'sub/root/a/Y'?"),
        ("row/rows[r]/Y", "did you mean 'row/rows["),
        ("root/sub/C", "did you mean 'sub/C'?"),
        ("/", "use one of: Y, sub/C, sub/root/a/Y, "),
    ],
)
async def test_the_nearest_name_is_told(router: RouterOfTarget, name: str, hint: str) -> None:
    """Or all that there are, where none is near."""
    with pytest.raises(InvalidArgumentError) as caught:
        await firsts(router.core, "nested", "Y", name)
    assert f"unexpected inference output '{name}' for model 'nested'" in caught.value.message
    assert hint in caught.value.message


@pytest.mark.parametrize("name", ["c\0", "\u202e", "x/" * 9_999])
async def test_a_name_that_none_can_have_is_refused(router: RouterOfTarget, name: str) -> None:
    """INVALID_ARGUMENT too, with a short message, before the graph sees it; also beside a good one."""
    for outputs in ([name], ["C", name]):
        with pytest.raises(InvalidArgumentError, match=r"^the name of a requested output has") as caught:
            await firsts(router.core, "many", *outputs)
        assert len(caught.value.message) < 1_000
    assert [] == router.target.calls


async def test_parameters_of_outputs_that_change_nothing_are_let_pass(router: RouterOfTarget) -> None:
    """How JSON would carry a tensor does not matter here; what would change the answer is refused."""
    for name in ("C", "a/Y"):
        message = request("many", [name])
        message.outputs[0].parameters["binary_data"].bool_param = False
        result = await router.core.infer(call_from_request(message), CallContext())
        assert [name] == list(result.outputs)
        for key in ("shared_memory_region", "odd"):
            message.outputs[0].parameters.clear()
            message.outputs[0].parameters[key].int64_param = 2
            with pytest.raises(UnsupportedError):
                await router.core.infer(call_from_request(message), CallContext())


async def test_outputs_and_intermediates_as_classes(router: RouterOfTarget) -> None:
    """Of a tensor asked for as classes the client gets value and index, of the others beside what they are."""
    for name, other in (("C", "a/Y"), ("a/Y", "C")):
        message = request("many", [name, other])
        message.outputs[0].parameters["classification"].int64_param = 1
        result = await router.core.infer(call_from_request(message), CallContext())
        assert [[b"20.000000:0"], [b"1.000000:0"]] == decode(result.outputs[name]).tolist()
        assert [[20, 20], [1, 1]] == decode(result.outputs[other]).tolist()


async def test_what_is_kept_for_requested_outputs_is_bounded() -> None:
    """Clients that ask for ever other outputs cannot fill the memory; the oldest is worked out again."""
    names = [f"o{i}" for i in range(MAX_SELECTIONS + 2)]
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": name}) for name in names]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=names))
    target = FakeTarget()
    executor = GraphExecutor(plan, Runtime({"model": target}))
    for name in (*names, names[0]):
        result = await make.run(executor, outputs=[name])
        assert [name] == list(result.outputs)
    assert [*names, names[0]] == target.called()
    assert MAX_SELECTIONS == len(executor._selections._known)


def test_an_order_skips_what_is_left_out() -> None:
    """What waited for a step that is left out waits for what that one waited for, and for nothing else."""
    steps = [make.step(name, name, {"IN": "X"}, {"OUT": name.upper()}) for name in "abcde"]
    plan = make.node("root", SequencePlan, steps, inputs=["X"], outputs=[*"ABCDE"])
    ordered = replace(
        plan,
        steps=tuple(
            replace(one, consumers=(index + 1,) if index < 4 else (), num_dependencies=min(index, 1))
            for index, one in enumerate(plan.steps)
        ),
    )
    rest = pruned(ordered, [0, 3, 4])
    assert [("a", (1,), 0), ("d", (2,), 1), ("e", (), 1)] == [
        (one.name, one.consumers, one.num_dependencies) for one in rest.steps
    ]


async def test_strings_come_back_as_they_are() -> None:
    """BYTES with a shape; a tensor that is not as declared fails, one that is lacking is left out."""
    call = make.call_plan("lid", ["IN"], ["OUT", make.spec("SCORE", "BYTES", (-1, -1))])
    root = make.node(
        "root", SequencePlan, [make.step("lid", call, {"IN": "X"}, {"OUT": "L"})], inputs=["X"], outputs=["X"]
    )
    text = make.text("a", "", "ü", "de", shape=(2, 2))
    for given, expected in (({"SCORE": text}, {"lid/SCORE": text}), ({}, {}), ({"SCORE": make.tensor(1)}, None)):

        async def answer(call: Any, context: CallContext, given: Any = given) -> Any:
            return {"OUT": make.tensor(1), **given}

        target = FakeTarget(lid=answer)
        if expected is None:
            with pytest.raises(InternalError, match=r"'SCORE' .* it is FP32"):
                await make.run(make.graph(root), target, outputs=["lid/SCORE"])
        else:
            assert expected == (await make.run(make.graph(root), target, outputs=["lid/SCORE"])).outputs
