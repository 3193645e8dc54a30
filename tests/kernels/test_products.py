"""Products on a CPU, with weights in panels or packed by oneDNN: right, of any rows, of their own row alone."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft_kernels.linear import onednn, products
from weft_kernels.linear.onednn import Int8Linear, PackedLinear
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import quantize_linear, quantize_nf4
from weft_kernels.processors import largest_code

torch.set_num_threads(1)

needs_panels = pytest.mark.skipif(
    not products.has_panels(torch.float32), reason="this CPU has no kernels, or there is no numba"
)
needs_codes = pytest.mark.skipif(not products.has_panels(torch.int8), reason="this CPU has no kernels of codes")
#: Each kind of product, and whether this CPU has it with numbers of a type.
KINDS = {"panels": products.has_panels, "oneDNN": onednn.is_native}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PANELS_OF = [dtype for dtype in DTYPES if products.has_panels(dtype)]
#: Outputs below and above a panel, and inputs below and above what is multiplied with all rows before the
#: next; for the last ones oneDNN has other kernels for a single row than for several.
SHAPES = [(1, 2), (33, 20), (150, 130), (64, 1100), (704, 256), (768, 2048)]
#: Bounds are those of the format on normal numbers, a tenth more.
CODES: dict[str, tuple[Callable[[torch.Tensor], QuantizedWeight], float]] = {
    "4 bits, groups of 32": (lambda weight: quantize_linear(weight, 4, 32, is_symmetric=False), 0.086),
    "4 bits, groups of 64, symmetric": (lambda weight: quantize_linear(weight, 4, 64), 0.115),
    "4 bits, groups of 128": (lambda weight: quantize_linear(weight, 4, 128, is_symmetric=False), 0.110),
    "4 bits, a scale for each output": (lambda weight: quantize_linear(weight, 4), 0.17),
    "NF4": (lambda weight: quantize_nf4(weight, 64), 0.101),
    "8 bits, groups of 32": (lambda weight: quantize_linear(weight, 8, 32), 0.009),
    "8 bits, groups of 16": (lambda weight: quantize_linear(weight, 8, 16), 0.009),
    "8 bits, a scale for each output": (lambda weight: quantize_linear(weight, 8), 0.013),
}


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def _is_its_own(multiply: products.Product, x: torch.Tensor) -> bool:
    together = multiply(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    chunks = [torch.cat([multiply(chunk) for chunk in x.split(size)]) for size in (1, 2, 5, 6, 7, 31, 32, 33, 97)]
    return torch.equal(together[order], multiply(x[order])) and all(torch.equal(together, each) for each in chunks)


def _linear(kind: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> products.Product:
    if kind == "oneDNN":
        return PackedLinear(weight, bias, deterministic=True)
    from weft_kernels.linear.panels import PanelLinear

    return PanelLinear(weight, bias)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind, has in KINDS.items() for dtype in DTYPES if has(dtype)]
)
def test_numbers(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """The product is that of the numbers to the last digits, and a row's is bitwise its own in any company."""
    x, weight, bias = _normal(100, shape[1]).to(dtype), _normal(*shape, seed=1).to(dtype), _normal(shape[0]).to(dtype)
    multiply = _linear(kind, weight, bias)
    out = multiply(x)
    assert (dtype, (100, shape[0])) == (out.dtype, out.shape)
    exact = x.double() @ weight.double().t() + bias.double()
    assert _error(out, exact) < (2e-6 if dtype == torch.float32 else 0.002)
    assert _is_its_own(multiply, x)
    assert (0, shape[0]) == multiply(x[:0]).shape


@needs_codes
@pytest.mark.parametrize("kind", CODES)
def test_codes(kind: str) -> None:
    """A product loses what the format of its codes and rows of 8 bits lose, no more; a row's is bitwise its own."""
    quantize, bound = CODES[kind]
    weight, bias, x = _normal(150, 256, seed=1), _normal(150, seed=2), _normal(100, 256)
    codes = quantize(weight)
    multiply = products.linear(codes, bias)
    exact, of_codes = x.double() @ weight.double().t() + bias.double(), x @ codes.dequantize().t() + bias
    assert _error(multiply(x), of_codes.double()) < 0.013
    assert _error(multiply(x), exact) < bound
    assert _is_its_own(multiply, x)
    assert _is_its_own(multiply, x.bfloat16())
    assert torch.bfloat16 == multiply(x.bfloat16()).dtype


@needs_codes
def test_inputs_in_another_order() -> None:
    """Codes in the order of their importance are multiplied with the inputs that they stand for."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(5))
    weight, x = _normal(70, 128, seed=1), _normal(9, 128)
    plain = quantize_linear(weight[:, order], 4, 32)
    codes = replace(plain, permutation=order)
    torch.testing.assert_close(products.linear(plain)(x[:, order]), products.linear(codes)(x), rtol=0, atol=0)


@needs_codes
@pytest.mark.parametrize("num_bits", [4, 8])
def test_odd_numbers(num_bits: int) -> None:
    """Zeros stay zeros; a row that is not a number, or infinite, is none afterwards, and harms no other."""
    weight = torch.ones(70, 64)
    weight[1] = 0.0
    x = torch.stack(
        [torch.zeros(64), torch.full((64,), 1e-40), torch.ones(64), torch.ones(64), torch.full((64,), 1e30)]
    )
    x[2, 7], x[3, 60] = torch.nan, -torch.inf
    out = products.linear(weight, num_bits=num_bits)(x)
    assert (0.0, 0.0) == (float(out[0].abs().max()), float(out[1].abs().max()))
    assert out[2, 2:].isnan().all()
    assert out[3, 2:].isnan().all()
    torch.testing.assert_close(out[4, 2:], torch.full((68,), 64e30), rtol=1e-3, atol=0)
    assert 0.0 == out[4, 1]


@pytest.mark.parametrize("dtype", PANELS_OF)
def test_not_a_number_stays_so(dtype: torch.dtype) -> None:
    """A number that is none makes its own row none, and no other."""
    x = torch.ones(8, 32, dtype=dtype)
    x[3, 5] = torch.nan
    out = _linear("panels", torch.ones(65, 32, dtype=dtype))(x)
    assert out[3].isnan().all()
    assert (out[[0, 1, 2, 4, 5, 6, 7]] == 32).all()


@needs_panels
def test_rows_of_a_wider_tensor() -> None:
    """Rows that are not contiguous are multiplied as they lie."""
    x, multiply = _normal(10, 90), _linear("panels", _normal(70, 40, seed=1))
    for part in (x[:, 13:53], x[::2, :40], x.t()[:40].t()):
        assert torch.equal(multiply(part.contiguous()), multiply(part))


@needs_panels
def test_rows_that_do_not_fit_are_refused() -> None:
    """Rows of another type or size are named with those that are allowed, and no memory beyond them is read."""
    multiply = products.linear(torch.ones(70, 32), deterministic=True)
    with pytest.raises(ValueError, match=r"must be torch.float32 \[T, 32\], got torch.float32 \[3, 31\]"):
        multiply(torch.ones(3, 31))
    with pytest.raises(ValueError, match=r"must be torch.float32 \[T, 32\], got torch.float64 \[3, 32\]"):
        multiply(torch.ones(3, 32, dtype=torch.float64))
    if products.has_panels(torch.int8):
        for bits in (4, 8):
            with pytest.raises(ValueError, match=r"must have shape \[T, 32\], got \[3, 64\]"):
                products.linear(torch.ones(70, 32), num_bits=bits)(torch.ones(3, 64))


@needs_panels
def test_several_threads() -> None:
    """Products are bitwise the same on one thread and on several."""
    x = _normal(9, 128)
    made = [products.linear(_normal(1100, 128, seed=1), deterministic=True)]
    if products.has_panels(torch.int8):
        made += [products.linear(_normal(1100, 128, seed=1), num_bits=bits) for bits in (4, 8)]
    alone = [multiply(x) for multiply in made]
    torch.set_num_threads(2)
    try:
        for multiply, expected in zip(made, alone, strict=True):
            assert torch.equal(expected, multiply(x))
    finally:
        torch.set_num_threads(1)


@needs_panels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no processes that fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_several_threads_in_a_forked_process() -> None:
    """A process that forks after a product on several threads multiplies on threads of its own, and waits for none."""
    code = """
import os, signal, numpy, torch
from weft_kernels.linear import panels
work = []
torch.set_num_threads(2)
panels._share(lambda first, last: work.append(last - first), 32 * panels.PANEL, numpy.array([0, 1]))
child = os.fork()
if not child:
    signal.alarm(20)
    panels._share(lambda first, last: work.append(last - first), 32 * panels.PANEL, numpy.array([0, 1]))
    os._exit(0 if sum(work) == 64 else 1)
print(os.waitpid(child, 0)[1])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "0\n" == run.stdout, run.stderr


@needs_panels
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="this system has no huge pages that we know of")
def test_large_weights_lie_in_huge_pages() -> None:
    """Memory of a weight is private and asks for huge pages, so that fewer addresses have to be looked up."""
    from weft_kernels.linear.panels import _memory

    memory = _memory(8 << 20)
    address = memory.ctypes.data
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for before, after in itertools.pairwise(mappings):
        header = next((line for line in before.splitlines() if " " in line and "-" in line.split()[0]), "")
        first, last = (int(edge, 16) for edge in header.split()[0].split("-"))
        if first <= address < last:
            assert "p" == header.split()[1][-1]
            assert "hg" in after.splitlines()[0].split()
            break
    else:
        pytest.fail("the memory is not among the mappings of the process")


@needs_panels
def test_what_is_taken_is_what_is_faster(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of panels and oneDNN the faster by measurement is taken, which the log says; in deterministic mode panels are."""
    from weft_kernels.linear.panels import PanelLinear

    taken = {}
    for name, times_ns in {"panels": [60, 90, 100, 100], "oneDNN": [60, 190, 100, 100]}.items():
        products._are_panels_faster.cache_clear()
        left = list(times_ns)
        monkeypatch.setattr(products, "_least_ns", lambda *_, left=left: left.pop(0))
        with caplog.at_level("INFO", "weft.kernels"):
            taken[name] = type(products.linear(torch.ones(8, 4)))
        assert f"inputs are those of {name}: with 1 and 32 rows" in caplog.messages[-1]
        assert isinstance(products.linear(torch.ones(8, 4), deterministic=True), PanelLinear)
    assert {"panels": PanelLinear, "oneDNN": onednn.PackedLinear} == taken
    products._are_panels_faster.cache_clear()


@needs_panels
def test_without_instructions_for_codes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A CPU without them multiplies the numbers of the codes, and the log says so; as it does with odd groups."""
    codes, x = quantize_linear(_normal(40, 64), 4, 32), _normal(3, 64)
    products._say_once.cache_clear()
    with caplog.at_level("INFO", "weft.kernels"):
        odd = quantize_linear(_normal(40, 64), 4, 16)
        torch.testing.assert_close(products.linear(odd)(x), x @ odd.dequantize().t(), rtol=1e-4, atol=1e-4)
        assert "weights in groups of 16 become numbers" in caplog.text
        monkeypatch.setattr(products, "has_panels", lambda dtype: False)
        torch.testing.assert_close(products.linear(codes)(x), x @ codes.dequantize().t(), rtol=1e-4, atol=1e-4)
        assert "none of AVX-512 VNNI, AVX2 and NEON" in caplog.text
        assert isinstance(products.linear(_normal(40, 64), num_bits=8), onednn.Int8Linear)
        products.linear(_normal(40, 65), num_bits=4)
        assert "weights of 65 inputs, no multiple of 32, have 8 bits instead of 4" in caplog.text
        monkeypatch.setattr(onednn, "is_native", lambda dtype: False)
        monkeypatch.setattr(onednn, "Int8Linear", None)
        weight = _normal(40, 64)
        assert _error(products.linear(weight, num_bits=8)(x), x.double() @ weight.double().t()) < 0.013
    products._say_once.cache_clear()


@needs_codes
@pytest.mark.parametrize("factor", [1, 20, 60])
def test_outliers_of_a_row_keep_the_digits_of_the_others(factor: int) -> None:
    """With two inputs of 256 far larger than the others a product of 8 bits loses no more than without them.

    So it is where they are not the same for every row, and where there are too many, which are rounded like the rest.
    """
    weight, x = _normal(300, 256, seed=1), _normal(60, 256)
    x[:, [7, 100]] *= factor
    x[20:, 30] *= factor
    multiply = products.linear(weight, num_bits=8)
    assert _error(multiply(x), x.double() @ weight.double().t()) < 0.011
    assert _is_its_own(multiply, x)
    x[0, ::8] = 100.0 * factor
    assert _error(multiply(x), x.double() @ weight.double().t()) < 0.02


def test_rows_are_padded_where_the_library_orders_its_sums_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is bitwise its own even if products of 2 rows and more differ, since all then have the same number."""
    monkeypatch.setattr(onednn, "_is_invariant", lambda shape, dtype: False)
    seen: list[int] = []
    product = PackedLinear._product
    monkeypatch.setattr(PackedLinear, "_product", lambda self, x: (seen.append(len(x)), product(self, x))[1])
    x = _normal(70, 2048)
    multiply = PackedLinear(_normal(768, 2048, seed=1), deterministic=True)
    together = multiply(x)
    assert torch.equal(together, torch.cat([multiply(chunk) for chunk in x.split(7)]))
    assert {onednn.ROWS_PER_TILE} == set(seen)


def test_the_check_of_the_library_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose products of 5 rows differ in one bit is not taken to be invariant."""
    onednn._is_invariant.cache_clear()
    assert onednn._is_invariant((64, 32), torch.float32)
    onednn._is_invariant.cache_clear()
    product = PackedLinear._product

    def wrong(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        out = product(self, x)
        if len(x) == 5:
            out[3, 7] = torch.nextafter(out[3, 7], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(PackedLinear, "_product", wrong)
    assert not onednn._is_invariant((64, 32), torch.float32)
    onednn._is_invariant.cache_clear()


@pytest.mark.parametrize("shape", [(1, 1), *SHAPES])
def test_eight_bits_of_onednn(shape: tuple[int, int]) -> None:
    """Products of normal numbers lose about a hundredth (Frobenius norm); each row has a scale of its own.

    Outputs and rows are of very different sizes. Where codes of rows have half of the range they lose twice as much.
    """
    weight = _normal(*shape, seed=1) * torch.logspace(-6, 6, shape[0]).unsqueeze(1)
    x = _normal(40, shape[1]) * torch.logspace(-3, 3, 40).unsqueeze(1)
    bias = _normal(shape[0])
    exact = x.double() @ weight.double().t()
    multiply = Int8Linear(weight, bias)
    errors = (multiply(x).double() - bias - exact).norm(dim=0) / exact.norm(dim=0)
    assert errors.median() < 0.013 * 127 / largest_code()
    for rows in (x, x.bfloat16()):
        assert rows.dtype == multiply(rows).dtype
        assert _is_its_own(multiply, rows)
    assert (0, shape[0]) == multiply(x[:0]).shape


def test_eight_bits_on_a_cpu_without_vnni() -> None:
    """Sums of pairs of codes, for which such a CPU has 16 bits, fit there: products of positive numbers are exact."""
    code = """
import torch
from weft_kernels.linear.onednn import Int8Linear
torch.set_num_threads(1)
for num_rows in (1, 2, 40):
    print((Int8Linear(torch.ones(70, 256))(torch.ones(num_rows, 256)) - 256).abs().max().item() < 1e-3)
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert 3 * "True\n" == run.stdout, run.stderr


def test_odd_numbers_in_8_bits() -> None:
    """Zeros stay zeros, in weights and in rows; a row that is not a number harms no other."""
    weight = torch.zeros(3, 8)
    weight[1] = 1.0
    x = torch.tensor([[0.0] * 8, [float("nan")] * 8, [2.0] * 8])
    out = Int8Linear(weight)(x)
    assert [0.0, 0.0, 0.0] == out[0].tolist()
    assert [0.0, 16.0, 0.0] == pytest.approx(out[2].tolist())
