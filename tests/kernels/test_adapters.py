"""Low-rank adapters: every implementation against float64, and rows that do not depend on one another."""

from types import ModuleType

import pytest
import torch

from weft_kernels import jit
from weft_kernels.adapters import reference, triton_kernel

IMPLEMENTATIONS = [reference, triton_kernel]
#: Inputs, ends of the parts of outputs, rank: the parts end within a tile, and sizes are no multiples of one.
SHAPES = [(70, (130, 150, 171), 8), (300, (97,), 16), (33, (40, 80), 5)]
SLOTS = (2, -1, 0, 2, 2, -1, 1, 0, 2)


def make_call(place, num_inputs: int, ends: tuple[int, ...], rank: int) -> list:
    """Arguments of ``add_lora``: nine rows, three slots, results of about unit size."""
    a = place.randn(3, num_inputs, len(ends) * rank, seed=2) / num_inputs**0.5
    b = place.randn(3, rank, ends[-1], seed=3) / rank**0.5
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=place.device)
    return [place.randn(9, ends[-1], seed=1), place.randn(9, num_inputs), a, b, ends, slots]


def expected_of(out, x, a, b, ends, slots) -> torch.Tensor:
    """The sums in float64, row by row and part by part."""
    result, rank = out.double(), b.shape[1]
    for row, slot in enumerate(slots.tolist()):
        for part, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
            down = a[slot, :, part * rank : (part + 1) * rank].double()
            if slot >= 0:
                result[row, first:end] += x[row].double() @ down @ b[slot, :, first:end].double()
    return result


def check(implementation: ModuleType, place) -> None:
    """Fused outputs, odd sizes, rows with and without an adapter."""
    for shape in SHAPES:
        call = make_call(place, *shape)
        expected = expected_of(*call)
        implementation.add_lora(*call)
        place.assert_close(expected / 4, call[0] / 4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_row_gets_its_own_adapter(implementation, place):
    """And rows without one stay bitwise as they are."""
    check(implementation, place)
    call = make_call(place, *SHAPES[0])
    before = call[0].clone()
    implementation.add_lora(*call)
    assert torch.equal(before[[1, 5]], call[0][[1, 5]])


def assert_rows_are_their_own(implementation: ModuleType, call: list) -> None:
    """Alone, in another order and among others, a row's result is bitwise the same."""
    out, x, a, b, ends, slots = call
    together = out.clone()
    implementation.add_lora(together, x, a, b, ends, slots)
    for rows in ([0], [8, 3, 6], [4, 0, 1, 2, 3, 5, 6, 7, 8]):
        own = out[rows]
        implementation.add_lora(own, x[rows], a, b, ends, slots[rows])
        assert torch.equal(together[rows], own)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_is_bitwise_its_own(implementation, place_float32):
    """So that deterministic mode stays so with adapters."""
    assert_rows_are_their_own(implementation, make_call(place_float32, *SHAPES[0]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows_are_no_work(implementation, place_float32):
    """An empty step changes nothing."""
    out, x, a, b, ends, slots = make_call(place_float32, *SHAPES[1])
    implementation.add_lora(out[:0], x[:0], a, b, ends, slots[:0])


@pytest.mark.skipif(not jit.is_available(), reason="numba is not installed")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_for_a_cpu(place_float32, dtype, bound, shape):
    """The sums are right, and a row's are its own."""
    if place_float32.device != "cpu":
        pytest.skip("of a CPU")
    from weft_kernels.adapters import cpu_kernel

    call = make_call(place_float32, *shape)
    call = [each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in call]
    expected = expected_of(*call)
    assert_rows_are_their_own(cpu_kernel, call)
    cpu_kernel.add_lora(*call)
    assert bound > (expected - call[0].double()).abs().max().item()
