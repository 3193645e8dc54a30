"""Rotary embedding and the store into the cache: the reference against a rotation, the kernel against the reference."""

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from weft_kernels.blocks.layout import MAX_CODE, cache_shape, split_layers
from weft_kernels.rope_kv import reference, triton_kernel

SLOTS = (0, 21, 64, 20, 79)  # the first is one of padding, in the null block
POSITIONS = (0, 1, 37, 99, 5)


@dataclasses.dataclass
class Step:
    """The arguments of a call; queries, keys and values are parts of one row, as a fused projection leaves them."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    slot_mapping: Tensor
    kv_layer: Tensor

    def run(self, rope_and_store: Callable[..., None]) -> None:
        """``rope_and_store`` with these arguments."""
        rope_and_store(*(getattr(self, field.name) for field in dataclasses.fields(self)))


def make_step(place, num_heads, num_kv_heads, head_dim) -> Step:
    """Five tokens for the middle one of three layers whose five blocks of 16 hold NaN."""
    row = place.randn(len(SLOTS), num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = row.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = torch.arange(100)[:, None] / 10000.0 ** (torch.arange(head_dim // 2) / (head_dim // 2))
    cos, sin = angles.cos().to(place.device), angles.sin().to(place.device)
    positions = torch.tensor(POSITIONS, dtype=torch.int32, device=place.device)
    slot_mapping = torch.tensor(SLOTS, device=place.device)
    kv = torch.full((5, 3, 2, 16, num_kv_heads, head_dim), float("nan"), dtype=place.dtype, device=place.device)
    return Step(q, k, v, cos, sin, positions, slot_mapping, kv[:, 1])


def rotated(x: Tensor, step: Step) -> Tensor:
    """``x`` with each pair of elements as a complex number turned by its token's angle, in float64."""
    half = x.shape[-1] // 2
    x = x.double()
    turn = torch.complex(step.cos.double(), step.sin.double())[step.positions.long()].unsqueeze(1)
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def check(rope_and_store: Callable[..., None], place, num_heads, num_kv_heads, head_dim) -> None:
    """Queries and keys are turned, keys and values stand in their slots, nothing else is written."""
    step = make_step(place, num_heads, num_kv_heads, head_dim)
    expected_q, expected_k, expected_v = rotated(step.q, step), rotated(step.k, step), step.v.clone()
    step.run(rope_and_store)
    place.assert_close(expected_q, step.q)
    place.assert_close(expected_k, step.k)
    assert torch.equal(expected_v, step.v)
    stored = step.kv_layer.permute(1, 0, 2, 3, 4).flatten(1, 2)
    assert torch.equal(step.k, stored[0, list(SLOTS)]), "keys are not in their slots"
    assert torch.equal(step.v, stored[1, list(SLOTS)]), "values are not in their slots"
    others = [slot for slot in range(80) if slot not in SLOTS]
    assert stored[:, others].isnan().all()
    whole = step.kv_layer._base
    assert whole[:, [0, 2]].isnan().all()


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 4, 32), (4, 4, 64), (5, 1, 80), (3, 3, 2)])
def test_reference_and_kernel_rotate_and_store(place, num_heads, num_kv_heads, head_dim):
    """Both hold for odd numbers of heads and head sizes that are no power of two."""
    check(reference.rope_and_store, place, num_heads, num_kv_heads, head_dim)
    check(triton_kernel.rope_and_store, place, num_heads, num_kv_heads, head_dim)


def check_codes(rope_and_store: Callable[..., None], place, num_heads, num_kv_heads, head_dim, kv_dtype) -> None:
    """Codes and scales of the rotated keys and of the values stand in their slots, and nothing else is written."""
    step = make_step(place, num_heads, num_kv_heads, head_dim)
    step.v[0] = 0.0
    step.v[1, 0, 0] = float("nan")
    cache = torch.full(cache_shape(5, 3, 16, num_kv_heads, head_dim, kv_dtype), 255, dtype=torch.uint8)
    layer = split_layers(cache.to(place.device).view(kv_dtype), num_kv_heads, head_dim)[1]
    step.kv_layer = layer.kv
    step.run(partial(rope_and_store, kv_scales=layer.scales))
    expected = torch.stack((step.k.double(), step.v.double()), 1)
    codes, scales = (x.transpose(1, 2).flatten(0, 1) for x in (layer.kv.float(), layer.scales.clone()))
    assert (0.0 == codes[SLOTS[0], 1] * scales[SLOTS[0], 1].unsqueeze(-1)).all()
    assert scales[SLOTS[1], 1, 0].isnan(), "scales are wrong"
    expected[1, 1, 0] = 0.0
    codes[SLOTS[1], 1, 0], scales[SLOTS[1], 1, 0] = 0.0, 0.0
    step_size = scales[list(SLOTS)].unsqueeze(-1) * (0.5 if kv_dtype == torch.int8 else 16.0)
    numbers = codes[list(SLOTS)] * scales[list(SLOTS)].unsqueeze(-1)
    assert ((numbers - expected).abs() <= step_size * 1.001).all(), "codes are wrong"
    largest = expected.abs().amax(-1).float() / MAX_CODE[kv_dtype]
    assert torch.allclose(scales[list(SLOTS)], largest, rtol=1e-5, atol=1e-7), "scales are wrong"
    others = [slot for slot in range(80) if slot not in SLOTS]
    assert scales[others].isnan().all()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 4, 32), (5, 1, 80), (3, 3, 2)])
def test_reference_and_kernel_store_codes(place, num_heads, num_kv_heads, head_dim, kv_dtype):
    """8-bit codes with a scale for each token and head; the interpreter rounds fp8 wrongly, so that needs a GPU."""
    check_codes(reference.rope_and_store, place, num_heads, num_kv_heads, head_dim, kv_dtype)
    if kv_dtype == torch.int8 or place.device == "cuda":
        check_codes(triton_kernel.rope_and_store, place, num_heads, num_kv_heads, head_dim, kv_dtype)


def test_no_tokens_are_no_work(place_float32):
    """An empty step leaves the cache as it was."""
    step = make_step(place_float32, 4, 2, 32)
    for name in ("q", "k", "v", "positions", "slot_mapping"):
        setattr(step, name, getattr(step, name)[:0])
    step.run(triton_kernel.rope_and_store)
    step.run(reference.rope_and_store)
    assert step.kv_layer.isnan().all()
