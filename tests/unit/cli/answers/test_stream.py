"""Responses of a decoupled model, as they are printed."""

from collections.abc import AsyncGenerator
from typing import Any

from weft.base.core import InferResult
from weft.base.tensors import bytes_tensor
from weft.cli.answers import print_stream


async def test_a_response_that_leaves_all_out_counts(capsys: Any) -> None:
    """It has a line; what only ends the stream has none."""

    async def results() -> AsyncGenerator[InferResult, None]:
        yield InferResult("m", "1", outputs={"A": bytes_tensor(["x"], (1,))}, is_final=False)
        yield InferResult("m", "1", is_final=False)
        yield InferResult("m", "1", is_null=True)

    await print_stream("m", results())
    first, second, last = capsys.readouterr().out.splitlines()
    assert 'A  BYTES[1]  ["x"]' == first
    assert "(the answer has no outputs: each may be left out)" == second
    assert last.startswith("m: 2 responses in ")
