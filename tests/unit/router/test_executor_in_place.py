"""In-place steps: a tensor that is an input of the node and an output of a step of it."""

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import Answer, FakeTarget, failing
from tests.unit.router.text_graphs import HEAD, compiled, sequence, x

from weft.base.core import CallContext, InferCall
from weft.base.tensors import WireTensor
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

#: From X to X, and to Y.
BOTH = HEAD.replace("output [", 'output [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] },')
IN_PLACE = 'step { name: "clean" model_name: "clean" output_map { key: "Y" value: "X" } }'
MAIN = 'step { name: "main" model_name: "main" }'


def adding(number: float) -> Answer:
    """A script: the first input and a number."""

    async def answer(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
        value = np.frombuffer(next(iter(call.inputs.values())).data, np.float32) + np.float32(number)
        return {"Y": WireTensor("FP32", (1,), value.tobytes())}

    return answer


async def answers(nodes: str, target: FakeTarget | None = None, *, head: str = BOTH, outputs: str = "") -> str:
    """Names and values of the outputs for X = 1; `clean` adds 10, `main` 100."""
    target = target or FakeTarget(clean=adding(10), main=adding(100), early=adding(1000))
    result = await make.run(compiled(nodes, head), target, x(1.0), outputs=outputs)
    return " ".join(f"{name}={np.frombuffer(one.data, np.float32)[0]:g}" for name, one in result.outputs.items())


async def test_the_output_is_that_of_the_step_and_so_is_what_later_steps_see() -> None:
    """What the step itself reads is the input of the graph."""
    assert "X=11 Y=111" == await answers(sequence(IN_PLACE, MAIN))


@pytest.mark.parametrize("extra", ["", 'after: "clean"'])
async def test_a_step_before_it_sees_the_input(extra: str) -> None:
    """Whenever it runs: the order in the file decides, not the time."""
    assert "X=11 Y=101" == await answers(sequence(MAIN.replace("}", f"{extra} }}"), IN_PLACE))


@pytest.mark.parametrize(("outputs", "expected"), [("X", "X=11"), ("Y", "Y=111")])
async def test_requested_outputs_need_it_or_not(outputs: str, expected: str) -> None:
    """The output of its name is the step's, whichever outputs are requested."""
    assert expected == await answers(sequence(IN_PLACE, MAIN), outputs=outputs)


async def test_a_map_names_what_a_step_there_would_see() -> None:
    """`input_map` follows the order as well where a tensor is both; the step's own input is that of the graph."""
    clean = IN_PLACE.replace('model_name: "clean"', 'model_name: "clean" input_map { key: "X" value: "X" }')
    main = 'step { name: "main" model_name: "main" input_map { key: "X" value: "X" } }'
    assert "X=11 Y=111" == await answers(sequence(clean, main))
    assert "X=11 Y=101" == await answers(sequence(main, clean))


async def test_a_condition_sees_what_its_step_sees() -> None:
    """Before the step the input, behind it the output."""
    large = "when: 'inputs.X[0] > 5.0' default { output: \"Y\" number: -1 dims: [ 1 ] } }"
    assert "X=11 Y=111" == await answers(sequence(IN_PLACE, MAIN.replace("}", large)))
    assert "X=11 Y=-1" == await answers(sequence(MAIN.replace("}", large), IN_PLACE))


@pytest.mark.parametrize("declared", ["", 'input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }'])
async def test_a_node_may_have_one_as_well(declared: str) -> None:
    """Whether it declares its inputs or not; the tensor outside stays what it was."""
    node = sequence(IN_PLACE, MAIN, name="inner").replace("sequence", f"{declared} sequence", 1)
    steps = (
        'step { node: "inner" }',
        'step { model_name: "early" output_map { key: "Y" value: "X" } }',
    )
    assert "X=1001 Y=111" == await answers(sequence(*steps) + node)


@pytest.mark.parametrize(
    ("carry", "expected"), [('carry { key: "X" value: "X" }', "X=31 Y=131"), ("", "X=11 Y=111")]
)  # fmt: skip
async def test_a_loop_carries_it_only_if_it_says_so(carry: str, expected: str) -> None:
    """Each round begins with what the node was given."""
    loop = f"loop {{ while: 'outputs.X[0] < 30.0' max_iterations: 3 {carry} }}"
    assert expected == await answers(sequence(IN_PLACE, MAIN, loop))


async def test_a_soft_one_leaves_its_default_not_the_input() -> None:
    """A tensor has one producer: where that fails, the input does not stand in for it."""
    soft = IN_PLACE.replace("output_map", 'dependency: SOFT default { output: "X" number: 7 dims: [ 1 ] } output_map')
    target = FakeTarget(clean=failing(), main=adding(100))
    assert "X=7 Y=107" == await answers(sequence(soft, MAIN), target)


async def test_its_tensors_can_be_requested_by_step() -> None:
    """`clean/Y` is what the step gave, under the target's own name."""
    executor = GraphExecutor(compiled(sequence(IN_PLACE, MAIN), BOTH), Runtime({"model": FakeTarget(clean=adding(10))}))
    result = await make.run(executor, inputs=x(1.0), outputs=["clean/Y"])
    assert ["clean/Y"] == list(result.outputs)
