"""Answers for people."""

import ml_dtypes
import numpy as np

from weft.base.core import InferResult
from weft.base.tensors import bytes_tensor, encode
from weft.cli.answers import render_result, render_tensor


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
