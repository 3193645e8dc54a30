"""Every check of a kernel could fail: it does for kernels with one defect planted, those of ``defects.txt``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.case_files import Case, cases
from tests.kernels import (
    test_adapters,
    test_attention,
    test_attention_items,
    test_blocks,
    test_experts,
    test_linear,
    test_lowbit,
    test_rope_kv,
    test_rows,
    test_sampling,
    test_state,
)

from weft_kernels.activation import triton_kernel as activation
from weft_kernels.adapters import triton_kernel as adapters
from weft_kernels.attention import items_triton_kernel, merge_triton_kernel
from weft_kernels.attention import triton_kernel as attention
from weft_kernels.blocks import triton_kernel as blocks
from weft_kernels.experts import triton_kernel as experts
from weft_kernels.linear import lowbit_triton_kernel as lowbit
from weft_kernels.linear import triton_kernel as linear
from weft_kernels.norm import triton_kernel as norm
from weft_kernels.rope_kv import triton_kernel as rope_kv
from weft_kernels.sampling import triton_kernel as sampling
from weft_kernels.state import triton_kernel as state
from weft_kernels.topk import triton_kernel as topk

SINKS = {"deterministic": True, "fixed_keys_per_part": 64, "num_stored": 40, "has_sinks": True}
PARTS = {"deterministic": True, "fixed_keys_per_part": 64, "window": 100, "num_stored": 40}


def _attention_of_codes(kernel: ModuleType, place) -> None:
    batch = test_attention.make_batch(test_attention.MIXED, 8, 2, 64, device=place.device, kv_dtype=torch.int8)
    place.assert_close(test_attention.plain_attention(batch), batch.run(kernel.paged_attention))


def _in_parts(name: str, **options: Any) -> Callable[..., None]:
    """The check of attention whose own function ``name`` is the planted module's."""

    def check(kernel: ModuleType, place) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, name, getattr(kernel, name))
            test_attention_items.check(place, attention, **(options or PARTS))

    return check


def _linear_of_codes(kernel: ModuleType, place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "num_processors", lambda device: 132)
        patch.setattr(kernel, "_MIN_TILES_PER_PART", 1)
        test_lowbit.check(place, "permuted", 3, module=kernel)


def _norm(kernel: ModuleType, place) -> None:
    for scale in (1e-3, 1.0):
        test_rows.assert_normalises(kernel.rms_norm, place, 3, 33, has_residual=True, scale=scale)


def _best_columns(kernel: ModuleType, place) -> None:
    x = place.randn(2, 200)
    x[:, 0] = 9.0
    test_rows.assert_finds_the_best(partial(kernel.softmax_topk, tile_columns=128), x, 1)


#: Of each check: the kernel's module, and the check of that or of one like it.
CHECKS: dict[str, tuple[ModuleType, Callable[..., None]]] = {
    "attention": (attention, lambda kernel, place: test_attention.check_kernel(kernel.paged_attention, place)),
    "attention of codes": (attention, _attention_of_codes),
    "work items": (items_triton_kernel, _in_parts("work_items")),
    "merge of parts": (merge_triton_kernel, _in_parts("merge_stored")),
    "attention in parts": (attention, lambda kernel, place: test_attention_items.check(place, kernel, **PARTS)),
    "sinks": (attention, lambda kernel, place: test_attention_items.check(place, kernel, **SINKS)),
    "sinks of parts": (merge_triton_kernel, _in_parts("merge_stored", **SINKS)),
    "linear": (linear, test_linear.check),
    "adapters": (adapters, test_adapters.check),
    "linear of codes": (lowbit, _linear_of_codes),
    "linear of experts": (linear, lambda kernel, place: test_experts.check(kernel, place, "numbers")),
    "codes of experts": (lowbit, lambda kernel, place: test_experts.check(kernel, place, "int4")),
    "sum of experts": (experts, lambda kernel, place: test_experts.assert_combines(kernel.combine, place, 33)),
    "copies of blocks": (blocks, test_blocks.check_copy),
    "inputs of a step": (state, lambda kernel, place: test_state.check(kernel.step_inputs, "mixed", place.device)),
    "rotation": (rope_kv, lambda kernel, place: test_rope_kv.check(kernel.rope_and_store, place, 4, 2, 32)),
    "rotation to codes": (
        rope_kv,
        lambda kernel, place: test_rope_kv.check_codes(kernel.rope_and_store, place, 4, 2, 32, torch.int8),
    ),
    "norm": (norm, _norm),
    "activation": (activation, lambda kernel, place: test_rows.assert_gates(kernel.silu_mul, place, 3, 33)),
    "best columns": (topk, _best_columns),
    "draws": (sampling, lambda kernel, place: test_sampling.check(kernel.sample, place)),
    "penalties": (
        sampling,
        lambda kernel, place: test_sampling.assert_penalises(kernel.apply_penalties, place.device),
    ),
    "masks": (sampling, lambda kernel, place: test_sampling.assert_masks(kernel.apply_masks, place.device)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "work items" else name for name in CHECKS]
)
def test_the_kernel_itself_passes(place_float32, name):
    """So that a failure is the defect's."""
    module, check = CHECKS[name]
    check(module, place_float32)


@cases(Path(__file__).with_name("defects.txt"))
def test_a_wrong_kernel_is_caught(place_float32, planted, case: Case):
    """Each defect makes the check fail that the kernel passes, because numbers differ and for no other reason."""
    _plant(place_float32, planted, case)


@pytest.mark.long
@cases(Path(__file__).with_name("slow_defects.txt"))
def test_a_kernel_that_is_wrong_about_its_work_is_caught(place_float32, planted, case: Case):
    """As above."""
    _plant(place_float32, planted, case)


def _plant(place, planted, case: Case) -> None:
    name, right, wrong = (line.replace("\\n", "\n") for line in case.lines)
    module, check = CHECKS[name]
    with pytest.raises(AssertionError, match=r"differs by|inputs differ|wrong|not in their slots"):
        check(planted(module, right, wrong), place)
