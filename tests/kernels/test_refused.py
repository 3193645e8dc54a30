"""Wrong shapes, types and layouts are named before a kernel is launched: ``refused.txt``."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.case_files import says, table
from tests.kernels.test_attention import SINGLE, make_batch
from tests.kernels.test_lowbit import make_weight
from tests.kernels.test_rope_kv import make_step as make_rope_step
from tests.kernels.test_state import STEPS, make_step

from weft_kernels.activation.triton_kernel import silu_mul
from weft_kernels.adapters.triton_kernel import add_lora
from weft_kernels.attention.triton_kernel import paged_attention
from weft_kernels.blocks.triton_kernel import gather_blocks, scatter_blocks
from weft_kernels.linear import lowbit_triton_kernel
from weft_kernels.linear.quantizers import quantize_linear
from weft_kernels.linear.triton_kernel import linear
from weft_kernels.norm.triton_kernel import rms_norm
from weft_kernels.rope_kv.triton_kernel import rope_and_store
from weft_kernels.sampling.triton_kernel import sample
from weft_kernels.state.triton_kernel import step_inputs
from weft_kernels.topk.triton_kernel import softmax_topk

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda tensor: tensor,
    ".t": lambda tensor: tensor.t(),
    ".t01": lambda tensor: tensor.transpose(0, 1),
    ".half": lambda tensor: tensor[..., ::2],
}


def _value(text: str, device: str) -> Any:
    """A number, or a tensor of zeros."""
    found = re.fullmatch(r"(\w+)\[([\d,]*)\](\.\w+)?", text)
    if found is None:
        return int(text)
    shape = [int(size) for size in found[2].split(",")]
    return VIEWS[found[3] or ""](torch.zeros(shape, dtype=getattr(torch, found[1]), device=device))


def _fields(made: Any) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}


def fitting_call(name: str, place) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function, and arguments that fit it."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=place.device)

    ids, kv = torch.tensor([1, 2], dtype=torch.int32, device=place.device), zeros(7, 3, 2, 16, 5, 9)
    match name:
        case "rms_norm":
            return rms_norm, {"x": zeros(2, 4), "weight": zeros(4), "eps": 1e-5}
        case "softmax_topk":
            return softmax_topk, {"x": zeros(2, 8), "k": 1}
        case "silu_mul":
            return silu_mul, {"gate_up": zeros(2, 4)}
        case "sample":
            columns = {name: zeros(2) for name in ("temperature", "top_p", "min_p")}
            integers = {"seeds": torch.int64, "top_k": torch.int32, "positions": torch.int32}
            return sample, {"logits": zeros(2, 8)} | columns | {n: zeros(2, dtype=t) for n, t in integers.items()}
        case "linear":
            return linear, {"x": zeros(3, 8), "weight": zeros(4, 8), "bias": zeros(4), "deterministic": True}
        case "add_lora":
            slots = zeros(3, dtype=torch.int32)
            call = {"out": zeros(3, 6), "x": zeros(3, 8), "a": zeros(2, 8, 4), "b": zeros(2, 4, 6)}
            return add_lora, call | {"ends": (6,), "slots": slots}
        case "linear of codes":
            return lowbit_triton_kernel.linear, {"x": zeros(3, 192), "weight": make_weight("int4", place)}
        case "gather_blocks":
            return gather_blocks, {"kv": kv, "ids": ids}
        case "scatter_blocks":
            return scatter_blocks, {"kv": kv, "ids": ids, "data": kv[:2]}
        case "step_inputs":
            return step_inputs, make_step(STEPS["one token each"], place.device) | {"block_size": 16}
        case "rope_and_store":
            return rope_and_store, _fields(make_rope_step(place, 4, 2, 32))
        case "paged_attention":
            batch = _fields(make_batch(SINGLE, 4, 2, 32, device=place.device))
            batch |= {"scale": 1.0, "max_q_len": 1, "max_ctx_len": 70}
            return paged_attention, {
                n: v for n, v in batch.items() if n in inspect.signature(paged_attention).parameters
            }
        case _:
            weight = quantize_linear(torch.ones(6, 24), 4, 8)
            return lambda **changes: dataclasses.replace(weight, **changes), {}


@pytest.mark.parametrize(("name", "changes", "words"), table(Path(__file__).with_name("refused.txt")))
def test_what_does_not_fit_is_refused(place_float32, name, changes, words):
    """The message has the tensor, what it is and what it must be, and no argument is written to."""
    function, arguments = fitting_call(name, place_float32)
    arguments |= {n: _value(v, place_float32.device) for n, _, v in (word.partition("=") for word in changes.split())}
    before = {n: value.clone() for n, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(ValueError, match=r".") as caught:
        function(**arguments)
    assert says(words, str(caught.value)), str(caught.value)
    for n, value in before.items():
        torch.testing.assert_close(value, arguments[n], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "name", ["rms_norm", "softmax_topk", "silu_mul", "sample", "linear", "add_lora", "gather_blocks", "scatter_blocks"]
)
def test_what_fits_is_taken(place_float32, name):
    """So that a refusal is the change's."""
    function, arguments = fitting_call(name, place_float32)
    function(**arguments)
