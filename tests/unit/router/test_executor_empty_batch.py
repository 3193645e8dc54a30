"""Batches of no rows in graphs: guarded, and passed on where graph and model take them."""

import pytest
from tests.unit.router.map_graphs import BATCHED, HEAD, Target, compiled, lists, numbers, outputs

from weft.base.core import InferCall
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import WireTensor
from weft.base.validation import validate

GUARDED = """
node { name: "root" sequence {
  step { name: "s" model_name: "sum@8" when: "size(inputs.LIST) > 0" default { output: "S" dims: [ 0, 1 ] }
         input_map { key: "ADD" value: "ADDS" } } } }
"""


async def test_a_guard_with_a_default_of_no_rows() -> None:
    """A list that is a model's batch is not sent where it is empty; the answer is an empty list."""
    plan, target = (
        compiled(GUARDED, HEAD.replace('"ADD"', '"ADDS"').replace("dims: [ 1 ]", "dims: [ -1, 1 ]")),
        Target(),
    )
    full = {"LIST": lists(3)["LIST"], "ADDS": numbers([0], [0], [0])}
    assert {"S": [[0], [11], [22]]} == await outputs(plan, target, full)
    empty = {"LIST": lists(0)["LIST"], "ADDS": WireTensor("INT64", (0, 1), b"")}
    assert {"S": []} == await outputs(plan, target, empty)
    assert 1 == len(target.calls)


@pytest.mark.parametrize("parameters", ["", 'parameters { key: "allow_empty_batch" }'])
def test_a_graph_takes_a_batch_of_no_rows_if_it_says_so(parameters: str) -> None:
    """As a model does."""
    plan = compiled('node { name: "root" sequence { step { model_name: "sum@4" } } }', _BATCHED_ROWS + parameters)
    empty = WireTensor("INT64", (0, 2), b"")
    call = InferCall("g", inputs={"LIST": empty, "ADD": WireTensor("INT64", (0, 1), b"")})
    if parameters:
        assert 0 == validate(call, plan.signature)
    else:
        with pytest.raises(InvalidArgumentError, match="'allow_empty_batch'"):
            validate(call, plan.signature)


_BATCHED_ROWS = BATCHED.replace("dims: [ -1, 2 ]", "dims: [ 2 ]")
