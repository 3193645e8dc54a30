"""Answers that lack outputs: what the graph makes of them, and what its own answer lacks then."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, failing
from tests.unit.router.text_graphs import BATCHING, HEAD, compiled, sequence, x

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError, InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.base.tensors import WireTensor, decode
from weft.language import GraphSource
from weft.router.executor import GraphExecutor
from weft.router.repository.config import config_of_graph, config_of_signature, message_of, signature_of
from weft.router.runtime import Runtime

#: A graph whose output V an answer may lack.
HEAD_V = HEAD.replace("output [ {", 'output [ { name: "V" data_type: TYPE_FP32 dims: [ 1 ] optional: true }, {')


def giving(*names: str) -> Any:
    """A script: the first input as each of these outputs, whatever was requested."""

    async def answer(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return dict.fromkeys(names, next(iter(call.inputs.values())))

    return answer


async def answer(plan: Any, outputs: Sequence[str] = (), /, **scripts: Any) -> tuple[dict[str, float], FakeTarget]:
    """Values of the outputs that the answer has, and the target."""
    target = FakeTarget(**scripts)
    result = await make.run(plan, target, x(2), outputs=outputs)
    return {name: float(decode(tensor).flat[0]) for name, tensor in result.outputs.items()}, target


async def test_what_nobody_reads_may_be_missing() -> None:
    """Only the outputs that are read are requested; a model that leaves the others out answers all the same."""
    plan = compiled(sequence('step { name: "a" model_name: "m-W" }'))
    assert {"Y": 2} == (await answer(plan, **{"m-W": giving("Y")}))[0]


@pytest.mark.parametrize(
    ("reader", "calls"),
    [
        ('step { name: "b" model_name: "n+O" input_map { key: "O" value: "W" } output_map { key: "Y" value: "Q" } }',
         2),
        ("step { name: 'b' model_name: 'n' when: 'has(inputs.W)' input_map { key: 'X' value: 'W' } default { output: "
         "'Q' number: 7 } output_map { key: 'Y' value: 'Q' } }", 1),
    ],
)  # fmt: skip
async def test_a_missing_output_that_nobody_has_to_have_is_absent(reader: str, calls: int) -> None:
    """It reaches an optional input, or a `when` that tests for it, though the configuration promises it."""
    head = HEAD.replace('"Y"', '"Q"')
    plan = compiled(sequence('step { name: "a" model_name: "m-W" output_map { key: "Y" value: "P" } }', reader), head)
    outputs, target = await answer(plan, **{"m-W": giving("Y")})
    assert (["Q"], calls) == (list(outputs), len(target.calls))
    assert all("O" not in call.inputs for call in target.calls)


@pytest.mark.parametrize(
    "nodes",
    [
        sequence('step { name: "a" model_name: "m-W" output_map { key: "Y" value: "P" } output_map { key: "W" '
                 'value: "Z" } } step { name: "b" model_name: "n+Z" }'),
        sequence('step { name: "a" model_name: "m-W" output_map { key: "Y" value: "P" } output_map { key: "W" '
                 'value: "Y" } }'),
        sequence("step { name: 'a' model_name: 'm-W' output_map { key: 'Y' value: 'P' } } step { name: 'b' when: "
                 "'max(inputs.W) > 0.0' default { output: 'Y' number: 1 } model_name: 'n' }"),
        sequence('step { name: "a" node: "in" } step { name: "b" model_name: "n" input_map { key: "X" value: "W" } }')
        + sequence('step { name: "c" model_name: "m-W" output_map { key: "Y" value: "P" } }', name="in"),
    ],
    ids=["required input", "output of the graph", "condition", "from within a node"],
)  # fmt: skip
async def test_a_missing_output_that_somebody_must_have_is_an_error(nodes: str) -> None:
    """The step that called the model fails with INTERNAL; the message has the cure."""
    with pytest.raises(InternalError) as caught:
        await answer(compiled(nodes), **{"m-W": giving("Y")})
    assert "output 'W' of step" in caught.value.message
    assert "is missing in the answer, which has Y; model 'm-W' declares it" in caught.value.message
    cure = 'parameters { key: "optional_outputs" value { string_value: "W" } }'
    assert cure in caught.value.message


async def test_a_fallback_stands_in_for_an_answer_that_lacks_what_is_needed() -> None:
    """The missing output is the failure of its step: a fallback, or softness, answers it."""
    step = "step { name: 'a' model_name: 'm' fallback { model_name: 'n' } }"
    assert {"Y": 2} == (await answer(compiled(sequence(step)), m=giving()))[0]


async def test_an_optional_output_of_the_graph_is_left_out() -> None:
    """The answer has it where the model gave it, and lacks it where it did not, also where it alone is requested."""
    plan = compiled(sequence('step { name: "a" model_name: "m-V" }'), HEAD_V)
    assert {"Y": 2, "V": 2} == (await answer(plan))[0]
    assert {"Y": 2} == (await answer(plan, **{"m-V": giving("Y")}))[0]
    assert {} == (await answer(plan, ["V"], **{"m-V": giving("Y")}))[0]
    assert {"a/Y": 2} == (await answer(plan, ["a/V", "a/Y"], **{"m-V": giving("Y")}))[0]


async def test_a_default_takes_the_place_of_a_missing_output() -> None:
    """Of a model's optional output, also on a step that is HARD; one row for each of the request."""
    step = 'step { name: "a" model_name: "m-V" default { output: "V" number: 7 } output_map { key: "Y" value: "P" } }'
    reader = 'step { name: "b" model_name: "n" input_map { key: "X" value: "V" } }'
    plan = compiled(sequence(step, reader), BATCHING)
    target = FakeTarget()
    target.answers["m-V"] = giving("Y")
    result = await make.run(plan, target, x(1, 2, 3))
    assert [[7], [7], [7]] == decode(result.outputs["Y"]).tolist()


async def test_a_default_holds_for_the_answer_of_a_fallback_and_of_a_node() -> None:
    """Whoever answers for the step, what the answer lacks has the default."""
    reader = 'step { name: "b" model_name: "n" input_map { key: "X" value: "V" } }'
    given = 'default { output: "V" number: 7 } output_map { key: "Y" value: "P" }'
    stand_in = 'fallback { model_name: "o-V" output_map { key: "Y" value: "P" } }'
    plan = compiled(sequence(f'step {{ name: "a" model_name: "m-V" {stand_in} {given} }}', reader))
    scripts = {"m-V": failing(), "o-V": giving("Y")}
    assert {"Y": 7} == (await answer(plan, **scripts))[0]
    inner = sequence('step { name: "c" model_name: "o-V" }', name="in")
    plan = compiled(sequence(f'step {{ name: "a" node: "in" {given} }}', reader) + inner)
    assert {"Y": 7} == (await answer(plan, **scripts))[0]


async def test_of_a_switch_only_some_branches_give_an_optional_output() -> None:
    """The answer lacks it where the branch that ran does not give it."""
    plan = compiled(
        "node { name: 'root' switch { step { name: 'a' when: 'request.id == \"\"' model_name: 'm' } "
        "step { name: 'b' otherwise: true model_name: 'n-V' } } }",
        HEAD_V,
    )
    assert {"Y": 2} == (await answer(plan))[0]
    target = FakeTarget()
    result = await make.run(plan, target, x(2), request_id="1")
    assert {"Y", "V"} == result.outputs.keys()


async def test_a_cascade_does_not_mix_answers() -> None:
    """An optional output of an answer that was not accepted is not in that of a step which has none."""
    nodes = (
        "node { name: 'root' cascade { step { name: 'a' model_name: 'm-V' accept: 'has(outputs.V) && "
        "max(outputs.V) > 9.0' } step { name: 'b' model_name: 'n' } } }"
    )
    plan = compiled(nodes, HEAD_V)
    outputs, target = await answer(plan)
    assert ({"Y": 2}, ["m-V", "n"]) == (outputs, target.called())


async def test_a_loop_starts_each_round_without_what_the_last_one_left_out() -> None:
    """An optional tensor that is carried over is absent in the next round where this one has not given it."""
    head = HEAD.replace("input  [ {", 'input [ { name: "O" data_type: TYPE_FP32 dims: [ 1 ] optional: true }, {')
    again = "loop { while: 'has(outputs.V)' max_iterations: 3 carry { key: 'V' value: 'O' } }"
    plan = compiled(f"node {{ name: 'root' sequence {{ step {{ name: 'a' model_name: 'm-V+O' }} {again} }} }}", head)
    target = FakeTarget()
    turns = iter([("Y", "V"), ("Y",)])

    async def script(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        return dict.fromkeys(next(turns), call.inputs["X"])

    target.answers["m-V+O"] = script
    result = await make.run(plan, target, x(2))
    assert [["X"], ["X", "O"]] == [sorted(call.inputs, reverse=True) for call in target.calls]
    assert ["Y"] == list(result.outputs)


@pytest.mark.parametrize(("method", "expected"), [("AVERAGE", {"Y": 2, "V": 2}), ("KEYED", {"a.V": 2})])
async def test_a_combine_takes_the_tensors_that_are_there(method: str, expected: dict[str, float]) -> None:
    """A member that answered without the tensor has no part in it."""
    members = "step { name: 'a' model_name: 'm-V' } step { name: 'b' model_name: 'n-V' }"
    if method == "KEYED":
        outputs = ", ".join(f'{{ name: "{o}.V" data_type: TYPE_FP32 dims: [ 1 ] optional: true }}' for o in "ab")
        head, combine = HEAD[: HEAD.index("output")] + f"output [ {outputs} ]", ""
    else:
        head, combine = HEAD_V, " ".join(f"combine {{ output: '{o}' method: AVERAGE }}" for o in "YV")
    plan = compiled(f"node {{ name: 'root' ensemble {{ {members} {combine} }} }}", head)
    assert expected == (await answer(plan, **{"n-V": giving("Y")}))[0]


@pytest.mark.parametrize("where", ["step", "graph"])
async def test_a_kept_answer_lacks_what_the_first_one_lacked(where: str) -> None:
    """The second of two equal requests has the same outputs, without a call."""
    cache = "policy { cache { ttl_ms: 60000 } }"
    step = f'step {{ name: "a" model_name: "m-V" {cache if where == "step" else ""} }}'
    plan = compiled(sequence(step) + (cache if where == "graph" else ""), HEAD_V)
    target = FakeTarget()
    target.answers["m-V"] = giving("Y")
    executor = GraphExecutor(plan, Runtime({"model": target}))
    for _ in range(2):
        assert ["Y"] == list((await make.run(executor, inputs=x(2))).outputs)
    assert ["m-V"] == target.called()


async def test_rows_that_go_their_own_way_have_an_optional_output_together_or_not_at_all() -> None:
    """A row whose branch gives none leaves the tensor without a value for that row, so it is absent."""
    nodes = (
        "node { name: 'root' switch { per_row: true step { name: 'a' when: 'inputs.X[0] > 1.0' model_name: 'm-V' } "
        "step { name: 'b' otherwise: true model_name: 'n' } } }"
    )
    plan = compiled(nodes, HEAD_V.replace('"graph"', '"graph" max_batch_size: 16'))
    assert ["V", "Y"] == sorted((await make.run(plan, FakeTarget(), x(2, 3))).outputs)
    assert ["Y"] == list((await make.run(plan, FakeTarget(), x(1, 2))).outputs)


def test_the_signature_says_what_may_be_missing() -> None:
    """In the plan, in the configuration that clients get, in that of a lock file, and back."""
    text = HEAD_V + sequence('step { name: "a" model_name: "m-V" }')
    plan = compiled(text.removeprefix(HEAD_V), HEAD_V)
    assert [("V", True), ("Y", False)] == [(spec.name, spec.is_optional) for spec in plan.signature.outputs]
    config = config_of_graph(GraphSource(text, "g.pbtxt", "g", "1"), plan)
    assert "V" == config.parameters["optional_outputs"].string_value
    assert plan.signature.outputs == ModelSignature.from_config(config, "1").outputs
    assert plan.signature.outputs == ModelSignature.from_config(config_of_signature(plan.signature), "1").outputs
    assert plan.signature.outputs == signature_of(message_of("model", plan.signature)).outputs


def ensemble(*steps: str, outputs: str = '{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }', head: str = HEAD) -> Any:
    """An ensemble as Triton Inference Server writes it."""
    head = head[: head.index("output")].replace('"graph"', '"ensemble"') + f"output [ {outputs} ]"
    return compiled(f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}", head)


FIRST = (
    '{ model_name: "m-W" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "p" } '
    'output_map { key: "W" value: "w" } }'
)


async def test_in_an_ensemble_absence_travels_to_optional_inputs() -> None:
    """As in Triton Inference Server: what a step leaves out is left out of the calls that take it."""
    last = (
        '{ model_name: "n+O" model_version: -1 input_map { key: "X" value: "p" } input_map { key: "O" value: "w" } '
        'output_map { key: "Y" value: "Y" } }'
    )
    outputs, target = await answer(ensemble(FIRST, last), **{"m-W": giving("Y")})
    assert ({"Y": 2}, ["X"]) == (outputs, list(target.calls[1].inputs))


async def test_in_an_ensemble_outputs_of_the_answer_may_be_missing() -> None:
    """They are left out; asked for alone, the answer has no output."""
    both = ", ".join(f'{{ name: "{name}" data_type: TYPE_FP32 dims: [ 1 ] }}' for name in "YZ")
    plan = ensemble(FIRST.replace('"p"', '"Y"').replace('"w"', '"Z"'), outputs=both)
    assert {"Y": 2} == (await answer(plan, **{"m-W": giving("Y")}))[0]
    assert {} == (await answer(plan, ["Z"], **{"m-W": giving("Y")}))[0]


async def test_in_an_ensemble_a_step_that_lacks_an_input_is_refused_and_told_why() -> None:
    """Code and text are the model's; what is missing, and which step did not give it, stands behind them."""

    async def refuse(call: InferCall, context: CallContext) -> Any:
        raise InvalidArgumentError("expected 2 inputs but got 1 inputs for model 'n+Z'.")

    last = (
        '{ model_name: "n+Z" model_version: -1 input_map { key: "X" value: "p" } input_map { key: "Z" value: "w" } '
        'output_map { key: "Y" value: "Y" } }'
    )
    with pytest.raises(InvalidArgumentError) as caught:
        await answer(ensemble(FIRST, last), **{"m-W": giving("Y"), "n+Z": refuse})
    assert caught.value.message.startswith("in ensemble 'g', ")
    assert caught.value.message.endswith("for model 'n+Z'. Input 'Z' takes 'w', which step 'm-W' did not give")
