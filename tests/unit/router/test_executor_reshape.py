"""``reshape`` of a graph's own inputs and outputs: clients see other dims than the steps do."""

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.text_graphs import BATCHING, HEAD, compiled, sequence

from weft.base.tensors import decode

#: Clients see [1, 1] where the model takes and gives [1].
RESHAPED = HEAD.replace("dims: [ 1 ]", "dims: [ 1, 1 ] reshape { shape: [ 1 ] }")
RESHAPED_BATCHING = BATCHING.replace("dims: [ 1 ]", "dims: [ 1, 1 ] reshape { shape: [ 1 ] }")
STEP = sequence('step { name: "a" model_name: "m" }')
ENSEMBLE = (
    'ensemble_scheduling { step [ { model_name: "m" model_version: -1 input_map { key: "X" value: "X" } '
    'output_map { key: "Y" value: "Y" } } ] }'
)


@pytest.mark.parametrize(
    ("head", "nodes", "outer", "inner"),
    [
        (RESHAPED, STEP, (1, 1), (1,)),
        (RESHAPED_BATCHING, STEP, (3, 1, 1), (3, 1)),
        (RESHAPED_BATCHING.replace('"graph"', '"ensemble"'), ENSEMBLE, (3, 1, 1), (3, 1)),
    ],
    ids=["graph", "batching graph", "ensemble"],
)
async def test_clients_and_steps_see_dims_of_their_own(
    head: str, nodes: str, outer: tuple[int, ...], inner: tuple[int, ...]
) -> None:
    """The bytes are the same; the signature has the dims of the clients."""
    plan, target = compiled(nodes, head), FakeTarget()
    assert [(1, 1), (1, 1)] == [spec.dims for spec in (*plan.signature.inputs, *plan.signature.outputs)]
    tensor = make.tensor(*range(outer[0]), shape=outer)
    result = await make.run(plan, target, {"X": tensor})
    assert inner == target.calls[0].inputs["X"].shape
    assert result.outputs == {"Y": tensor}


async def test_a_reshaped_graph_in_a_graph() -> None:
    """The graph around it sees what clients would; each of several answers is converted once."""
    inner = RESHAPED.replace('"g"', '"inner"') + STEP
    head = HEAD.replace("dims: [ 1 ]", "dims: [ 1, 1 ]")
    plan, target = compiled(sequence('step { name: "s" graph: "inner" }'), head, inner=inner), FakeTarget()
    tensor = make.tensor(5, shape=(1, 1))
    for _ in range(2):
        assert {"Y": tensor} == (await make.run(plan, target, {"X": tensor})).outputs
    assert [(1,), (1,)] == [call.inputs["X"].shape for call in target.calls]


async def test_an_output_that_steps_read_too_is_converted_for_the_client_alone() -> None:
    """Steps read it with the dims that the model gave."""
    head = RESHAPED.replace("output [", 'output [ { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] },')
    last = 'step { name: "b" model_name: "n" input_map { key: "X" value: "Y" } output_map { key: "Y" value: "Z" } }'
    plan, target = compiled(sequence('step { name: "a" model_name: "m" }', last), head), FakeTarget()
    result = await make.run(plan, target, {"X": make.tensor(5, shape=(1, 1))})
    assert {"Z": (1,), "Y": (1, 1)} == {name: tensor.shape for name, tensor in result.outputs.items()}
    assert 5 == decode(result.outputs["Z"])[0]
