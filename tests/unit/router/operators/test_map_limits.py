"""How many rows a map takes, so that no request takes all memory."""

import tracemalloc

import pytest
from tests.unit.router.map_graphs import BATCHED, HEAD, READ, Target, compiled, lists, numbers, outputs

from weft.base.errors import WeftError
from weft.base.tensors import WireTensor

NUM = 'input { name: "NUM" data_type: TYPE_INT64 dims: [ 1 ] }'


@pytest.mark.parametrize("model", ["sum@0", "sum@64"])
@pytest.mark.parametrize(("head", "lead"), [(HEAD, ()), (BATCHED, (1,)), (BATCHED, (4,))])
@pytest.mark.parametrize("counts", ["", 'lengths: "NUM" max_rows: 64'])
async def test_ten_million_rows_are_refused_before_anything_is_made_of_them(
    model: str, head: str, lead: tuple[int, ...], counts: str
) -> None:
    """Whether they count or are padding; nothing is called, and no memory is taken for rows."""
    target = Target()
    plan = compiled(READ % (f'model_name: "{model}"', counts), f"{head}{NUM}")
    shape = (*lead, 10_000_000 // sum(lead or (1,)), 2)
    inputs = {
        "LIST": WireTensor("INT64", shape, bytes(160_000_000)),
        "ADD": numbers(*([[0]] * sum(lead)) if lead else [0]),
    }
    inputs["NUM"] = numbers(*([[1]] * sum(lead)) if lead else [1])
    tracemalloc.start()
    try:
        with pytest.raises(
            WeftError, match=r"g/1: root: 10000000 rows, padding included, .* higher 'max_rows'"
        ) as caught:
            await outputs(plan, target, inputs)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert ("INVALID_ARGUMENT", []) == (caught.value.code, target.calls)


@pytest.mark.parametrize(
    ("max_rows", "size", "is_taken"), [(0, 65_536, True), (0, 65_537, False), (65_537, 65_537, True)]
)
async def test_rows_have_a_limit_that_a_map_may_raise(max_rows: int, size: int, is_taken: bool) -> None:
    """65,536 rows of all lists, unless `max_rows` is more."""
    target, plan = Target(), compiled(READ % ('model_name: "sum@4096"', f"max_rows: {max_rows}"))
    try:
        assert size == len((await outputs(plan, target, lists(size)))["S"])
    except WeftError:
        assert not is_taken
    assert is_taken == bool(target.calls)


async def test_rows_of_a_default_are_limited_too() -> None:
    """A map whose step does not run makes as many of them as there are rows; without a default it makes none."""
    step = 'model_name: "sum@4" when: "size(inputs.LIST) == 0"'
    given = {"LIST": WireTensor("INT64", (70_000, 2), bytes(16 * 70_000)), "ADD": numbers(0)}
    with pytest.raises(WeftError, match="70000 rows"):
        await outputs(compiled(READ % (f'{step} default {{ output: "S" integer: 0 }}', "")), Target(), given)
    head = HEAD + 'output { name: "S" data_type: TYPE_INT64 dims: [ -1, 1 ] optional: true }'
    assert {} == await outputs(compiled(READ % (step, ""), head), Target(), given)
