"""The dispatch: what it imports, what it is told by the environment, and in which order weights lie in memory."""

import os
import subprocess
import sys

import pytest
import torch

from weft_model.llm import ops

torch.set_num_threads(1)


def _run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_no_kernel_is_imported_on_a_cpu() -> None:
    """An operation on a CPU brings in its plain form alone, at its first call."""
    code = """
import sys, torch
from weft_model.llm import ops
assert not [name for name in sys.modules if name.startswith("weft_kernels")]
ops.silu_mul(torch.ones(1, 4))
print([name for name in sys.modules if name.startswith("weft_kernels.")])
"""
    expected = "['weft_kernels.activation', 'weft_kernels.activation.reference']\n"
    assert expected == _run(code, WEFT_KERNELS="").stdout


def test_environment_is_checked() -> None:
    """A value of ``WEFT_KERNELS`` that means nothing is refused with those that do."""
    assert (
        "WEFT_KERNELS must be one of auto, triton, got 'cuda'"
        in _run("import weft_model.llm.ops", WEFT_KERNELS="cuda").stderr
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_order_of_a_weight(dtype: torch.dtype) -> None:
    """Another order in memory changes no number, and a weight that lies right already is not copied."""
    weight = torch.randn(6, 4).to(dtype)
    ordered = ops.linear_weight(weight)
    assert torch.equal(weight, ordered)
    assert ordered.data_ptr() == ops.linear_weight(ordered).data_ptr()
    assert (dtype != torch.float32) == ordered.is_contiguous()
