"""Answers as a person reads them: tensors, streams, traces."""

from collections.abc import AsyncGenerator
from typing import Any

import ml_dtypes
import numpy as np

from weft.base.core import InferResult
from weft.base.tensors import bytes_tensor, encode
from weft.cli.answers import painter, print_stream, read_trace, render_result, render_tensor, render_trace


def test_every_output_has_a_line() -> None:
    """Name, datatype, shape and values of each output, aligned."""
    result = InferResult(
        "m", "1", outputs={"LABEL": bytes_tensor(["ja"], (1, 1)), "P": encode(np.array([0.25, 0.75], np.float32))}
    )
    assert render_result(result) == 'LABEL  BYTES[1, 1]  [["ja"]]\nP      FP32[2]  [0.25, 0.75]'


def test_an_answer_without_outputs_says_so() -> None:
    """All of them may be optional."""
    assert "(the answer has no outputs: each may be left out)" == render_result(InferResult("m", "1"))


def test_a_long_tensor_is_abridged() -> None:
    """An embedding takes one line."""
    text = render_tensor(encode(np.zeros((1, 384), np.float32)))
    assert text.startswith("FP32[1, 384]  [[0., 0., 0., ...")
    assert "\n" not in text
    assert len(text) < 100


def test_bytes_that_are_no_text_are_counted() -> None:
    """An image in an answer does not fill the terminal, and control characters are escaped."""
    assert render_tensor(bytes_tensor([b"\xff\x00\xfe"], (1,))) == "BYTES[1]  [<3 bytes>]"
    assert render_tensor(bytes_tensor(["a\x1b[2Jb"], (1,))) == 'BYTES[1]  ["a\\u001b[2Jb"]'
    assert len(render_tensor(bytes_tensor(["x" * 5000], (1,)))) < 250


def test_bfloat16_is_shown_as_numbers() -> None:
    """BF16, which numpy does not know, is shown like FP32."""
    assert render_tensor(encode(np.array([1.5], ml_dtypes.bfloat16))) == "BF16[1]  [1.5]"


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


def test_colours_change_nothing_but_colours() -> None:
    """The text without escapes is the plain text."""
    steps = [{"path": "root/a", "start_ms": 0, "ms": 1.0, "model": "m", "status": "INTERNAL", "error": "boom"}]
    coloured = render_trace(steps, painter(is_coloured=True))
    assert "\x1b[31mINTERNAL\x1b[0m" in coloured
    for code in ("\x1b[31m", "\x1b[36m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert render_trace(steps) == coloured


def test_nesting_without_end_is_no_trace() -> None:
    """A server that answers with text that is nested without end breaks nothing here."""
    assert [] == read_trace("[" * 200_000)
