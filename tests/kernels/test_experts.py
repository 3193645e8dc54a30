"""Mixtures of experts: their choice, products with the weights of those that have rows, and the sum."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.conftest import Place

from weft_kernels.experts import reference, triton_kernel
from weft_kernels.linear import products
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import quantize_linear, quantize_nf4

torch.set_num_threads(1)

NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS = 7, 70, 192  # more outputs than a panel or tile has, and no multiple of one
IMPLEMENTATIONS = [reference, triton_kernel]
if products.has_panels(torch.float32):
    from weft_kernels.experts import cpu_kernel

    IMPLEMENTATIONS.append(cpu_kernel)
PLACE = Place("cpu", torch.float32, 1e-4)
KINDS = ("numbers", "int8", "int4", "nf4", "int8 in groups of 16", "int4 in odd groups", "apart", "several layouts")


def on_its_device(implementation, place):
    """The implementation, where it runs on the device and in the type."""
    if implementation.__name__.endswith("cpu_kernel") and (place.device != "cpu" or place.dtype == torch.float16):
        pytest.skip("compiled for CPUs, in float32 and bfloat16")
    return implementation


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_normalized", [False, True])
def test_the_choice_and_its_order(implementation, place, is_normalized):
    """The k largest, of equal ones the lower; rows are in the order of experts, and each choice has its place."""
    logits = (place.randn(13, NUM_EXPERTS) * 2).round() / 2
    logits[logits == 0] = 0.0  # and not -0.0
    route = on_its_device(implementation, place).route
    shares, rows, places, starts = (each.cpu() for each in route(logits, 3, is_normalized=is_normalized))

    wide = logits.double().cpu()
    ids = torch.argsort(wide, dim=1, descending=True, stable=True)[:, :3]
    expected = torch.softmax(wide.gather(1, ids), 1) if is_normalized else torch.softmax(wide, 1).gather(1, ids)
    assert torch.allclose(expected, shares.double(), rtol=1e-5, atol=1e-6)
    order = sorted((expert, row, choice) for row, own in enumerate(ids.tolist()) for choice, expert in enumerate(own))
    assert [row for _, row, _ in order] == rows.tolist()
    assert [order.index((int(ids[row, choice]), row, choice)) for row in range(13) for choice in range(3)] == (
        places.flatten().tolist()
    )
    assert [sum(each[0] < expert for each in order) for expert in range(NUM_EXPERTS + 1)] == starts.tolist()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("num_wrong", "is_normalized"), [(1, True), (1, False), (NUM_EXPERTS, True)])
def test_a_row_that_is_not_a_number(implementation, place_float32, num_wrong, is_normalized):
    """Even of one expert: it still goes to experts that there are, each once, and its shares are no numbers."""
    logits = place_float32.randn(3, NUM_EXPERTS)
    logits[1, -num_wrong:] = torch.nan
    route = on_its_device(implementation, place_float32).route
    shares, rows, places, starts = route(logits, 2, is_normalized=is_normalized)
    assert shares[1].isnan().all()
    assert not shares[[0, 2]].isnan().any()
    assert [0, 0, 1, 1, 2, 2] == sorted(rows.tolist())
    assert list(range(6)) == sorted(places.flatten().tolist())
    assert 6 == starts[-1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_columns", [33, 1100])
def test_the_sum_of_the_choices(implementation, place, num_columns):
    """Each row is the sum of its places times their shares, bitwise its own in any company; no rows are no work."""
    assert_combines(on_its_device(implementation, place).combine, place, num_columns)


def assert_combines(combine, place, num_columns):
    """The sum, bitwise that of parts of the rows."""
    y, shares = place.randn(15, num_columns), torch.rand(5, 3).to(place.device)
    places = torch.randperm(15, generator=torch.Generator().manual_seed(3)).view(5, 3).to(place.device)
    out = combine(y, places, shares)
    place.assert_close((y[places].double() * shares.double().unsqueeze(2)).sum(1) / 4, out / 4)
    assert torch.equal(
        out, torch.cat([combine(y, *each) for each in zip(places.split(2), shares.split(2), strict=True)])
    )
    assert (0, num_columns) == combine(y, places[:0], shares[:0]).shape


def make_weight(kind: str, place) -> products.Matrix:
    """Unit rows of all experts, in codes of every way."""
    weight = place.randn(NUM_EXPERTS * NUM_OUTPUTS, NUM_INPUTS, seed=1).float().cpu() / NUM_INPUTS**0.5
    match kind:
        case "numbers":
            made = (weight.to(place.dtype),)
        case "int8":
            made = (quantize_linear(weight, 8),)
        case "int4":
            made = (quantize_linear(weight, 4, 32, is_symmetric=False),)
        case "nf4":
            made = (quantize_nf4(weight, 64),)
        case "int8 in groups of 16":
            made = (quantize_linear(weight, 8, 16, is_symmetric=False),)
        case "int4 in odd groups":
            made = (quantize_linear(weight, 4, 24, is_symmetric=False),)
        case "apart":
            orders = [
                torch.randperm(NUM_INPUTS, generator=torch.Generator().manual_seed(5 + each)) for each in range(7)
            ]
            made = tuple(
                replace(quantize_linear(part[:, order], 4, 32), permutation=order)
                for part, order in zip(weight.chunk(NUM_EXPERTS), orders, strict=True)
            )
        case _:
            halves = weight.split(NUM_OUTPUTS // 2)
            made = tuple(quantize_linear(half, 8 - place_ % 2 * 4, 32) for place_, half in enumerate(halves))
    moved = tuple(part.to(place.device) for part in made)
    return moved if len(moved) > 1 else moved[0]


def numbers_of(weight: products.Matrix) -> torch.Tensor:
    """The weights of all experts, float64 ``[E, out, in]``."""
    parts = weight if isinstance(weight, tuple) else (weight,)
    numbers = [part.dequantize() if isinstance(part, QuantizedWeight) else part for part in parts]
    return torch.cat([part.double() for part in numbers]).view(NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS)


def expected_of(x, weight, bias, ids):
    """Products of each row with the weights of the experts that it chose, in the order of experts."""
    order = sorted((expert, row) for row, own in enumerate(ids.tolist()) for expert in own)
    numbers = numbers_of(weight)
    outputs = [x[row].double() @ numbers[expert].t() for expert, row in order]
    biases = torch.zeros(NUM_EXPERTS, NUM_OUTPUTS) if bias is None else bias.view(NUM_EXPERTS, -1).double().cpu()
    return torch.stack(outputs).cpu() + torch.stack([biases[expert] for expert, _ in order])


def chosen(num_rows: int, num_chosen: int = 2) -> torch.Tensor:
    """Experts of each row; the last has none."""
    generator = torch.Generator().manual_seed(num_rows)
    return torch.rand(num_rows, NUM_EXPERTS - 1, generator=generator).topk(num_chosen).indices.int()


def arguments(ids: torch.Tensor, device: str) -> dict[str, torch.Tensor]:
    """``rows`` and ``starts`` of the choice."""
    _, rows, _, starts = reference.sorted_by_expert(ids.float(), ids, NUM_EXPERTS, is_normalized=False)
    return {"rows": rows.to(device), "starts": starts.to(device)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "has_bias"), [(1, True), (9, False), (70, True)])
def test_products_on_a_gpu(place, kind, num_rows, has_bias):
    """One row, a few and many, of experts with several tiles and with none, as Triton's kernels multiply them."""
    weight, x, ids = make_weight(kind, place), place.randn(num_rows, NUM_INPUTS), chosen(num_rows)
    bias = place.randn(NUM_EXPERTS * NUM_OUTPUTS, seed=2) if has_bias else None
    multiply = products.linear(weight, bias, dtype=place.dtype, num_experts=NUM_EXPERTS, has_kernels=True)
    expected = expected_of(x, weight, bias, ids)
    place.assert_close(expected / 4, multiply(x, **arguments(ids, place.device)).cpu() / 4)


def check(kernel, place, kind):
    """The kernel's products of 20 rows, of experts with several rows and with none, with a bias."""
    weight, x, ids = make_weight(kind, place), place.randn(20, NUM_INPUTS), chosen(20)
    bias = place.randn(NUM_EXPERTS * NUM_OUTPUTS, seed=2)
    out = kernel.linear(x, weight, bias, num_experts=NUM_EXPERTS, **arguments(ids, place.device))
    place.assert_close(expected_of(x, weight, bias, ids) / 4, out.cpu() / 4)


@pytest.mark.usefixtures("rows_alike")
@pytest.mark.parametrize("kind", ["numbers", "int4"])
def test_a_row_on_a_gpu_is_bitwise_its_own(place_float32, kind):
    """Deterministic: a row's products are the same alone and beside others, however many its experts have."""
    weight, x, ids = make_weight(kind, place_float32), place_float32.randn(70, NUM_INPUTS), chosen(70)
    multiply = products.linear(weight, num_experts=NUM_EXPERTS, has_kernels=True, deterministic=True)
    assert_its_own(multiply, x, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_on_a_cpu(kind, dtype):
    """Those of the numbers, up to rows of 8 bits where there are codes; a row's is bitwise its own in any company."""
    weight, bias = make_weight(kind, PLACE), PLACE.randn(NUM_EXPERTS * NUM_OUTPUTS, seed=2).to(dtype)
    if isinstance(weight, torch.Tensor):
        weight = weight.to(dtype)
    multiply = products.linear(weight, bias, dtype=dtype, num_experts=NUM_EXPERTS, deterministic=True)
    for num_rows in (1, 9, 150):
        x, ids = PLACE.randn(num_rows, NUM_INPUTS).to(dtype), chosen(num_rows)
        expected = expected_of(x, weight, bias, ids)
        error = (multiply(x, **arguments(ids, "cpu")).double() - expected).norm() / expected.norm()
        assert error < (0.013 if kind != "numbers" else 2e-6 if dtype == torch.float32 else 0.004)
    assert dtype == multiply(x, **arguments(ids, "cpu")).dtype
    assert_its_own(multiply, x, ids)
    assert (0, NUM_OUTPUTS) == multiply(x[:0], **arguments(ids[:0], "cpu")).shape


def assert_its_own(multiply, x, ids):
    """The products of rows 3 and 4 alone are those of all rows."""
    together = multiply(x, **arguments(ids, x.device))
    alone = multiply(x[3:5], **arguments(ids[3:5], x.device))
    places, own_places = (
        reference.sorted_by_expert(each, each, NUM_EXPERTS, is_normalized=False)[2] for each in (ids, ids[3:5])
    )
    assert torch.equal(together[places[3:5].to(x.device)], alone[own_places.to(x.device)])


@pytest.mark.parametrize("num_bits", [8, 4])
def test_rounded_numbers_on_two_threads(num_bits):
    """Weights that are rounded as they are taken; bitwise the same on one thread and on several."""
    weight, x, ids = make_weight("numbers", PLACE), PLACE.randn(40, NUM_INPUTS), chosen(40)
    multiply = products.linear(weight, num_bits=num_bits, num_experts=NUM_EXPERTS)
    expected = expected_of(x, weight, None, ids)
    alone = multiply(x, **arguments(ids, "cpu"))
    assert (alone.double() - expected).norm() / expected.norm() < (0.013 if num_bits == 8 else 0.09)
    torch.set_num_threads(2)
    try:
        assert torch.equal(alone, multiply(x, **arguments(ids, "cpu")))
    finally:
        torch.set_num_threads(1)
