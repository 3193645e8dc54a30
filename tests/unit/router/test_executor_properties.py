"""Random graphs under random delays, failures and cancels against a naive interpreter that runs one step at a time."""

import asyncio
from typing import Any

from hypothesis import given, note, reject, settings
from hypothesis import strategies as st
from tests.unit.router import make
from tests.unit.router.naive_interpreter import Interpreter
from tests.unit.router.naive_values import NEVER, AmbiguousError, FailsError
from tests.unit.router.random_drawing import graphs_of_any_batch, num_examples
from tests.unit.router.random_graph_text import files_of, plan_of, target_of
from tests.unit.router.random_graphs import Node
from tests.unit.router.random_requests import inputs_of, policies, wired
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.errors import WeftError


@settings(deadline=None, max_examples=num_examples(120))
@given(
    root=graphs_of_any_batch(),
    seed=st.integers(0, 5),
    num_rows=st.integers(1, 4),
    has_extra=st.booleans(),
    timeout_ms=st.sampled_from([0, 0, 30, 80, 150]),
    num_wanted=st.integers(0, 2),
)
def test_a_graph_answers_as_one_step_at_a_time(
    root: Node, seed: int, num_rows: int, has_extra: bool, timeout_ms: int, num_wanted: int
) -> None:
    """The same output or the same status at the same moment, nothing left behind, whatever fails, is late or absent."""
    note(files_of(root))
    inputs = inputs_of(seed, num_rows if root.is_batched else 1, has_extra=has_extra)
    plan = plan_of(root)
    outputs = root.outputs[-num_wanted:] if num_wanted else ()

    async def check() -> None:
        clock = VirtualClock()
        start_ns = clock()
        deadline_ns = start_ns + timeout_ms * 1_000_000 if timeout_ms else NEVER
        expected: Any
        try:
            values = {"X": inputs["X"], "E": inputs.get("E")}
            ends = Interpreter(deadline_ns).node(root, values, start_ns, deadline_ns, outputs or root.outputs)
            expected, end_ns = (
                {name: b"".join(rows) for name, rows in ends.outputs.items() if rows is not None},
                ends.at,
            )
        except FailsError as failure:
            expected, end_ns = failure.code, failure.at
        target, options = target_of(root), policies()
        found: Any
        try:
            context = make.context(timeout_ms=timeout_ms or None)
            tensors = wired(inputs, is_batched=root.is_batched)
            result = await make.run(plan, target, tensors, context=context, outputs=outputs, **options)
            found = {name: tensor.data for name, tensor in result.outputs.items()}
        except WeftError as error:
            found = error.code
        assert (expected, end_ns) == (found, clock())
        assert (0, 0) == (target.num_open, make.num_other_tasks())

    try:
        asyncio.run(check())
    except AmbiguousError:
        reject()


@settings(deadline=None, max_examples=num_examples(40))
@given(root=graphs_of_any_batch(), seed=st.integers(0, 5), at_ms=st.integers(0, 250), num_cancels=st.integers(1, 3))
def test_a_cancel_at_any_moment_leaves_nothing_of_a_graph(root: Node, seed: int, at_ms: int, num_cancels: int) -> None:
    """It ends at once, as cancelled if it was not over, and no call and no task is left."""

    async def check() -> None:
        clock = VirtualClock()
        target, options = target_of(root), policies()
        rows = inputs_of(seed, 3 if root.is_batched else 1, has_extra=True)
        inputs = wired(rows, is_batched=root.is_batched)
        request = asyncio.create_task(make.run(plan_of(root), target, inputs, **options))
        await asyncio.sleep(at_ms / 1e3)
        was_over = request.done()
        for _ in range(num_cancels):
            request.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([request])
        assert was_over != request.cancelled()
        assert was_over or float(at_ms) == clock.elapsed_ms()
        assert isinstance(None if request.cancelled() else request.exception(), WeftError | None)
        assert (0, 0) == (target.num_open, make.num_other_tasks())

    asyncio.run(check())
