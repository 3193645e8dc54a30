"""Batch sizes that change between steps: in an ensemble of Triton Inference Server's rules, and nowhere else."""

from collections.abc import Mapping

import numpy as np
import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.text_graphs import BATCHING, compiled, sequence, x

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError
from weft.base.tensors import WireTensor, decode, encode

#: One row in, as many rows out as its number says.
BURST = (
    '{ model_name: "burst" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "rows" } }'
)
LAST = (
    '{ model_name: "last" model_version: -1 input_map { key: "X" value: "rows" } output_map { key: "Y" value: "Y" } }'
)


def ensemble(*steps: str) -> str:
    """The text of an ensemble from X to Y, as Triton Inference Server writes it."""
    return BATCHING.replace('"graph"', '"ensemble"') + f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"


def burst_target() -> FakeTarget:
    """Model `burst` gives the rows 0, 1, ... below the number that it gets; the others give what they get."""

    async def burst(call: InferCall, context: CallContext) -> Mapping[str, WireTensor]:
        count = int(decode(call.inputs["X"])[0, 0])
        return {"Y": encode(np.arange(count, dtype=np.float32).reshape(count, 1))}

    return FakeTarget(burst=burst)


@pytest.mark.parametrize("count", [0, 1, 3, 9])
async def test_an_ensembles_steps_may_change_the_batch_size(count: int) -> None:
    """The next step is called with those rows, and so is the answer of the ensemble."""
    head, _, rest = ensemble(BURST, LAST).partition("ensemble_scheduling")
    target = burst_target()
    result = await make.run(compiled(f"ensemble_scheduling{rest}", head), target, x(count, 7))
    assert (count, 1) == result.outputs["Y"].shape
    assert [(2, 1), (count, 1)] == [call.inputs["X"].shape for call in target.calls]
    assert [2, max(count, 1)] == [call.num_rows for call in target.calls]


async def test_an_answer_of_a_graphs_step_has_the_rows_of_its_call() -> None:
    """The same model in a graph: the step that called it fails."""
    plan = compiled(sequence('step { name: "b" model_name: "burst" }'), BATCHING)
    with pytest.raises(InternalError, match="its batch size is 3, that of the request is 2"):
        await make.run(plan, burst_target(), x(3, 7))
    assert (2, 1) == (await make.run(plan, burst_target(), x(2, 7))).outputs["Y"].shape


async def test_an_ensemble_in_a_graph_gives_the_rows_that_it_got() -> None:
    """Inside it they may change; what leaves it for the graph around has those of the graph's request."""
    inner = ensemble(BURST, LAST).replace('"g"', '"inner"')
    plan = compiled(sequence('step { name: "e" graph: "inner" }'), BATCHING, inner=inner)
    text = (
        r"g/1: root/e: output 'Y' of ensemble 'inner/1' has batch size 3, that of the request is 2; a step of a graph"
    )
    with pytest.raises(InternalError, match=text):
        await make.run(plan, burst_target(), x(3, 7))
    assert (2, 1) == (await make.run(plan, burst_target(), x(2, 7))).outputs["Y"].shape


async def test_an_ensemble_in_an_ensemble_may_change_the_batch_size() -> None:
    """The batch size belongs to each step, also where the step is an ensemble."""
    inner = ensemble(BURST, LAST).replace('"g"', '"missing"')
    outer = ensemble(BURST.replace('"burst"', '"missing"'), LAST)
    head, _, rest = outer.partition("ensemble_scheduling")
    plan = compiled(f"ensemble_scheduling{rest}", head, missing=inner)
    assert (3, 1) == (await make.run(plan, burst_target(), x(3, 7))).outputs["Y"].shape
