"""Maps: one step for every row of a list."""

import asyncio

import numpy as np
import pytest
from tests.unit.router.map_graphs import BATCHED, HEAD, READ, Target, compiled, lists, numbers, outputs

from weft.base.core import CallContext
from weft.base.errors import WeftError
from weft.base.tensors import encode
from weft.router.bandits.store import bandit_choices
from weft.router.reporting.path import PATH_HEADER


async def test_chunks_have_as_many_rows_as_the_model_takes_and_come_back_in_order() -> None:
    """Ten rows for a model of four: three calls, one answer for each row, with what goes to all of them."""
    target = Target()
    result = await outputs(compiled(READ % ('model_name: "sum@4"', "")), target, lists(10, add=100))
    assert {"S": [[100 + 11 * row] for row in range(10)]} == result
    assert [(4, 2), (4, 2), (2, 2)] == target.sizes()


async def test_a_model_without_batching_gets_row_by_row() -> None:
    """Its tensors have no further dimension."""
    target = Target()
    result = await outputs(compiled(READ % ('model_name: "sum@0"', "")), target, lists(3, add=1))
    assert ({"S": [[1], [12], [23]]}, [(2,)] * 3) == (result, target.sizes())


@pytest.mark.parametrize("model", ["sum@4", "sum@0"])
async def test_an_empty_list_makes_no_call(model: str) -> None:
    """And gives an empty list of the declared type."""
    target = Target()
    plan, context = compiled(READ % (f'model_name: "{model}"', "")), CallContext()
    assert {"S": []} == await outputs(plan, target, lists(0), context=context)
    assert [] == target.calls
    path = dict(context.trailing_metadata)[PATH_HEADER]
    assert ("root*()", []) == (path, bandit_choices(path, plan.root))


async def test_no_more_chunks_are_in_work_than_it_says() -> None:
    """Two of five at most."""
    target = Target()
    await outputs(compiled(READ % ('model_name: "sum@2"', "max_inflight: 2")), target, lists(10))
    assert 2 == target.peak


async def test_lists_of_a_batch_share_chunks() -> None:
    """Two lists of three rows are six rows for the step, each with what its request brought."""
    target = Target()
    plan = compiled(READ % ('model_name: "sum@4"', ""), BATCHED)
    result = await outputs(plan, target, {"LIST": numbers(*[[[1, 0], [2, 0], [3, 0]]] * 2), "ADD": numbers([10], [20])})
    assert {"S": [[[11], [12], [13]], [[21], [22], [23]]]} == result
    assert [(4, 2), (2, 2)] == target.sizes()


async def test_a_model_without_batching_in_a_graph_with_a_batch_dimension() -> None:
    """Each row of each list is a call."""
    target = Target()
    plan = compiled(READ % ('model_name: "sum@0"', ""), BATCHED)
    result = await outputs(
        plan, target, {"LIST": numbers([[1, 0], [2, 0]], [[3, 0], [4, 0]]), "ADD": numbers([10], [20])}
    )
    assert ({"S": [[[11], [12]], [[23], [24]]]}, [(2,)] * 4) == (result, target.sizes())


LENGTHS = BATCHED + 'input { name: "NUM" data_type: TYPE_INT32 dims: [ 1 ] }'


async def test_rows_behind_the_length_of_a_list_are_padding() -> None:
    """The step does not get them, and they are zeros in a STACK."""
    target = Target()
    plan = compiled(READ % ('model_name: "sum@4"', 'lengths: "NUM"'), LENGTHS.replace("INT32", "INT64"))
    inputs = {"LIST": numbers([[1, 0], [2, 0], [3, 0]], [[4, 0], [5, 0], [6, 0]]), "ADD": numbers([10], [20])}
    result = await outputs(plan, target, {**inputs, "NUM": numbers([1], [2])})
    assert ({"S": [[[11], [0], [0]], [[24], [25], [0]]]}, [(3, 2)]) == (result, target.sizes())


async def test_strings_are_cut_and_joined() -> None:
    """Also where some rows are padding."""
    plan = compiled(READ % ('model_name: "text@2"', 'lengths: "NUM"'), LENGTHS.replace("INT32", "INT64"))
    inputs = {"LIST": numbers([[1, 0], [2, 0]], [[4, 0], [5, 0]]), "ADD": numbers([0], [0]), "NUM": numbers([2], [1])}
    result = await outputs(plan, Target(), inputs)
    assert {"T": [[[b"[1, 0]"], [b"[2, 0]"]], [[b"[4, 0]"], [b""]]]} == result


async def test_rows_of_several_sizes_are_refused_by_a_stack() -> None:
    """With the shapes and the cure."""
    plan = compiled(READ % ('model_name: "repeat@1"', ""))
    inputs = {"LIST": numbers([7, 2], [8, 3]), "ADD": numbers(0)}
    text = r'g/1: root: output .R.: rows of shapes \[2\] and \[3\] do not make one tensor; .*"R" method: LIST'
    with pytest.raises(WeftError, match=text) as caught:
        await outputs(plan, Target(), inputs)
    assert "INVALID_ARGUMENT" == caught.value.code


async def test_a_list_has_rows_one_after_another_and_their_lengths() -> None:
    """Rows of any length, an empty one among them."""
    plan = compiled(READ % ('model_name: "repeat@1"', 'collect { output: "R" method: LIST }'))
    result = await outputs(plan, Target(), {"LIST": numbers([7, 2], [8, 0], [9, 3]), "ADD": numbers(0)})
    assert {"R": [7, 7, 9, 9, 9], "R_LENGTHS": [2, 0, 3]} == result


async def test_lists_of_a_batch_are_padded_to_the_longest() -> None:
    """Each request has its own, and the lengths tell where they end."""
    collect = 'collect { output: "R" method: LIST lengths: "L" }'
    plan = compiled(READ % ('model_name: "repeat@1"', collect), BATCHED)
    inputs = {"LIST": numbers([[7, 2], [8, 0]], [[9, 3], [1, 1]]), "ADD": numbers([0], [0])}
    assert {"R": [[7, 7, 0, 0], [9, 9, 9, 1]], "L": [[2, 0], [3, 1]]} == await outputs(plan, Target(), inputs)


async def test_the_first_failure_fails_the_map_and_cancels_the_other_chunks() -> None:
    """The message tells the rows; nothing is left in work."""
    target, context = Target(), CallContext()
    inputs = {"LIST": numbers(*([row, 0] for row in range(20))), "ADD": numbers(0)}
    plan = compiled(READ % ('model_name: "fail@2"', "max_inflight: 4"))
    with pytest.raises(WeftError, match=r"root\[s\] -> fail@2@1: thirteen \(rows 12 to 13 of 20\)") as caught:
        await outputs(plan, target, inputs, context=context)
    assert ("UNAVAILABLE", 0) == (caught.value.code, target.num_open)
    assert "root*(s#20!)" == dict(context.trailing_metadata)[PATH_HEADER]


async def test_rows_of_a_soft_chunk_have_the_default() -> None:
    """Only those of the chunk that failed."""
    plan = compiled(READ % ('model_name: "fail@2" dependency: SOFT default { output: "S" integer: -1 }', ""))
    inputs = {"LIST": numbers([1, 1], [2, 2], [13, 0], [3, 3], [4, 4]), "ADD": numbers(0)}
    assert {"S": [[2], [4], [-1], [-1], [8]]} == await outputs(plan, Target(), inputs)


async def test_when_is_tested_once_on_the_whole_list() -> None:
    """If it is false every row has the default, and no call is made."""
    step = 'model_name: "sum@2" when: "size(inputs.LIST) < 4" default { output: "S" integer: -1 }'
    plan, target = compiled(READ % (step, "")), Target()
    assert {"S": [[0], [11], [22]]} == await outputs(plan, target, lists(3))
    assert {"S": [[-1]] * 5} == await outputs(plan, target, lists(5))
    assert 2 == len(target.calls)


async def test_a_longer_list_than_allowed_is_refused() -> None:
    """With what came, what is allowed, and the cure."""
    target, plan = Target(), compiled(READ % ('model_name: "sum@2"', "max_rows: 4"))
    assert 4 == len((await outputs(plan, target, lists(4)))["S"])
    text = "g/1: root: a list of 5 rows came to map 'root', which takes up to 4; send fewer, or raise its 'max_rows'"
    with pytest.raises(WeftError, match=text) as caught:
        await outputs(plan, target, lists(5))
    assert ("INVALID_ARGUMENT", 2) == (caught.value.code, len(target.calls))


async def test_a_map_in_a_map() -> None:
    """Each row of the outer list is the list of the inner one."""
    nodes = """
    node { name: "root" map {
        over: "LISTS" step { name: "o" node: "inner" input_map { key: "LIST" value: "LISTS" } } } }
    node { name: "inner" map { over: "LIST" step { name: "s" model_name: "sum@4" } } }
    """
    target = Target()
    inputs = {"LISTS": numbers([[1, 0], [2, 0], [3, 0]], [[4, 0], [5, 0], [6, 0]]), "ADD": numbers(0)}
    assert {"S": [[[1], [2], [3]], [[4], [5], [6]]]} == await outputs(compiled(nodes, HEAD_OF_LISTS), target, inputs)
    assert [(3, 2), (3, 2)] == target.sizes()


HEAD_OF_LISTS = """
name: "g" platform: "graph"
input [ { name: "LISTS" data_type: TYPE_INT64 dims: [ -1, -1, 2 ] }, { name: "ADD" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""


@pytest.mark.parametrize("bad", [False, True])
async def test_a_map_may_be_a_guard(bad: bool) -> None:
    """Each row is judged though nobody reads what comes of it; the first that is refused stops what follows."""
    head = HEAD + 'output { name: "S" data_type: TYPE_INT64 dims: [ -1, 1 ] }'
    nodes = """node { name: "root" sequence {
      step { name: "guard" node: "each" output_map { key: "S" value: "OF_GUARD" } }
      step { name: "main" node: "work" after: "guard" } } }
    node { name: "each" map { over: "LIST" step { name: "s" model_name: "fail@4" } } }
    node { name: "work" map { over: "LIST" step { name: "s" model_name: "sum@4" } } }"""
    plan, target = compiled(nodes, head), Target()
    rows = dict(lists(10, add=100))
    if bad:
        rows["LIST"] = numbers([1, 0], [13, 0], [3, 0])
        with pytest.raises(WeftError, match="thirteen"):
            await outputs(plan, target, rows)
        assert ["fail@4"] == target.called()
    else:
        assert {"S": [[100 + 11 * row] for row in range(10)]} == await outputs(plan, target, rows)
        assert ["fail@4"] * 3 + ["sum@4"] * 3 == target.called()


async def test_chunks_that_wait_for_nothing_let_others_have_their_turn() -> None:
    """A thousand rows that a cache answers do not keep the event loop to themselves."""
    target, num_turns = Target(), 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    plan = compiled(READ % ('model_name: "sum@0" policy { cache { } }', "max_inflight: 1"))
    rows = {"LIST": numbers(*[[1, 2]] * 1000), "ADD": numbers(0)}
    task = asyncio.create_task(others())
    result = await outputs(plan, target, rows)
    task.cancel()
    assert (1, 1000) == (len(target.calls), len(result["S"]))
    assert num_turns > 20


@pytest.mark.parametrize("lengths", [False, True])
async def test_an_absent_list_of_a_batch(lengths: bool) -> None:
    """Each request of the batch has a list of no rows, whatever the lengths say of lists that did not come."""
    head = LENGTHS.replace("INT32", "INT64").replace("dims: [ -1, 2 ]", "dims: [ -1, 2 ] optional: true")
    step = 'model_name: "sum@4" when: "has(inputs.LIST)" default { output: "S" integer: -1 }'
    plan = compiled(READ % (step, 'lengths: "NUM"' if lengths else ""), head)
    given = {"ADD": numbers([1], [2], [3]), **({"NUM": numbers([1], [2], [3])} if lengths else {})}
    assert {"S": [[], [], []]} == await outputs(plan, Target(), given)


@pytest.mark.parametrize(("length", "status"), [(-1, "INVALID_ARGUMENT"), (3, "INVALID_ARGUMENT"), (0, ""), (2, "")])
async def test_lengths_are_from_none_to_all(length: int, status: str) -> None:
    """Any other is refused, with what is allowed."""
    plan = compiled(READ % ('model_name: "sum@4"', 'lengths: "NUM"'), LENGTHS.replace("INT32", "INT64"))
    inputs = {"LIST": numbers([[1, 0], [2, 0]]), "ADD": numbers([0]), "NUM": numbers([length])}
    if status:
        with pytest.raises(WeftError, match=f"'NUM' says that {length} rows .* give 0 to 2") as caught:
            await outputs(plan, Target(), inputs)
        assert status == caught.value.code
    else:
        assert {"S": [[[1] if length else [0], [2] if length else [0]]]} == await outputs(plan, Target(), inputs)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2)])
async def test_lists_of_lists_without_rows(shape: tuple[int, ...]) -> None:
    """Every LIST is empty, and the lengths have the shape of what was empty."""
    nodes = """
    node { name: "root" map { over: "LISTS" step { node: "inner" input_map { key: "LIST" value: "LISTS" } }
      collect { output: "R" method: LIST lengths: "OUTER" }
      collect { output: "R_LENGTHS" method: LIST lengths: "NUM" } } }
    node { name: "inner" map { over: "LIST" step { model_name: "repeat@1" } collect { output: "R" method: LIST } } }
    """
    inputs = {"LISTS": encode(np.zeros(shape, np.int64)), "ADD": numbers(0)}
    result = await outputs(compiled(nodes, HEAD_OF_LISTS), Target(), inputs)
    assert {"R": [], "R_LENGTHS": [], "OUTER": [0] * shape[0], "NUM": [0] * shape[0]} == result


async def test_a_request_of_a_sequence_goes_through_a_map_over_a_model_without_state() -> None:
    """Its parameters travel with every chunk, as with any call."""
    target = Target()
    plan = compiled(READ % ('model_name: "sum@2"', ""))
    assert {"S": [[0], [11], [22]]} == await outputs(plan, target, lists(3), parameters={"sequence_id": 7})
    assert [7, 7] == [call.parameters["sequence_id"] for call in target.calls]
