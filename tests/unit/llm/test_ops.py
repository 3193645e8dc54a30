"""The dispatch: what it imports, what it is told by the environment, and in which order weights lie in memory."""

import os
import subprocess
import sys

import pytest
import torch

from weft_kernels import jit
from weft_kernels.linear import products

torch.set_num_threads(1)


def _run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(not jit.is_available(), reason="numba is not installed, or disabled")
def test_no_kernel_is_imported_on_a_cpu() -> None:
    """An operation on a CPU brings in its own form alone, at its first call, and never the Triton language."""
    code = """
import sys, torch
from weft.llm import ops
from weft_kernels.linear import products
before = set(sys.modules)
ops.softmax_topk(torch.ones(1, 4), 1)
ops.silu_mul(torch.ones(1, 4, dtype=torch.float16))
assert "triton" not in sys.modules and "numba" not in sys.modules
ops.silu_mul(torch.ones(1, 4))
assert "triton" not in sys.modules
print(sorted(name for name in set(sys.modules) - before if name.startswith("weft_kernels.")))
"""
    expected = [
        *("weft_kernels.activation", "weft_kernels.activation.cpu_kernel", "weft_kernels.activation.reference"),
        *("weft_kernels.jit_cache", "weft_kernels.numbers", "weft_kernels.topk", "weft_kernels.topk.reference"),
    ]
    assert f"{expected}\n" == _run(code, WEFT_KERNELS="").stdout


def test_environment_is_checked() -> None:
    """A value of ``WEFT_KERNELS`` that means nothing is refused with those that do."""
    assert (
        "WEFT_KERNELS must be one of auto, triton, got 'cuda'"
        in _run("import weft.llm.ops", WEFT_KERNELS="cuda").stderr
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_linear_layer_multiplies(dtype: torch.dtype, deterministic: bool) -> None:
    """Whatever form its weight has, packed or plain, the product is that of the numbers."""
    x, weight, bias = torch.randn(5, 40).to(dtype), torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype)
    expected = x.double() @ weight.double().t() + bias.double()
    out = products.linear(weight, bias, deterministic=deterministic)(x)
    assert dtype == out.dtype
    torch.testing.assert_close(expected, out.double(), atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0.01)


def test_kernels_multiply_with_codes() -> None:
    """Where kernels run, a weight of codes is multiplied as it is, and one of numbers is rounded first."""
    code = """
import torch
from weft_kernels.linear.quantizers import quantize
from weft.llm import ops
from weft_kernels.linear import products
x, weight = torch.randn(3, 64), torch.randn(24, 64)
for num_bits in (8, 4):
    codes = quantize(weight, num_bits)
    expected = x @ codes.dequantize().t()
    for given in (codes, weight):
        for deterministic in (False, True):
            options = {"num_bits": num_bits, "deterministic": deterministic}
            out = products.linear(given, has_kernels=ops.ARE_KERNELS_FORCED, **options)(x)
            torch.testing.assert_close(expected, out, atol=1e-4, rtol=1e-4)
print("equal")
"""
    run = _run(code, WEFT_KERNELS="triton", TRITON_INTERPRET="1")
    assert ("equal\n", "") == (run.stdout, run.stderr)


def test_the_faster_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 16-bit type is kept only if products with it are no slower than with float32, for few rows and for many."""
    times_ns = {torch.bfloat16: {1: 100, 32: 100}, torch.float32: {1: 100, 32: 100}}
    monkeypatch.setattr(products, "product_ns", lambda shape, dtype, num_rows: times_ns[dtype][num_rows])
    assert torch.bfloat16 == products.faster_dtype(torch.bfloat16, (8, 4))
    times_ns[torch.bfloat16][32] = 120
    assert torch.float32 == products.faster_dtype(torch.bfloat16, (8, 4))
    assert torch.float32 == products.faster_dtype(torch.float32, (8, 4))
