"""Weights of a GGUF file."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Self

import torch

from weft.base.errors import InvalidArgumentError
from weft.llm.weights.gguf.blocks import BLOCK_TYPES, BlockType, to_weight
from weft.llm.weights.gguf.container import GgufFile
from weft.llm.weights.gguf.model_metadata import ROPE_FACTORS, GgufLayout
from weft.llm.weights.parts import Part, is_norm
from weft_kernels.linear.quantized import QuantizedWeight

#: Names in the file of what a Hugging Face folder calls otherwise.
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NUM_NAMED = 5


class GgufSource:
    """Reads weights one at a time. Created by ``open``.

    Args:
        file: The open file.
        layout: Of the files of the architecture.
        head_dim: Width of a head.
    """

    def __init__(self, file: GgufFile, layout: GgufLayout, head_dim: int) -> None:
        self._file = file
        self._layout = layout
        self._names = {**_OF_LAYER, **layout.names}
        self._head_dim = head_dim

    @classmethod
    @contextmanager
    def open(cls, path: Path, layout: GgufLayout, head_dim: int) -> Iterator[Self]:
        """Open the file, whose configuration was read; leaving the ``with`` block closes it.

        Raises:
            NotFoundError, InvalidArgumentError: As of ``GgufFile.open``.
        """
        with GgufFile.open(path) as file:
            yield cls(file, layout, head_dim)

    @property
    def format_name(self) -> str:
        """Name of the format, for the log."""
        return "gguf"

    def check(self, parts: Iterable[Part], ignored: Iterable[str]) -> None:
        """Validate names, shapes and types of all tensors against the model, before any is read.

        Args:
            parts: All weights of the model.
            ignored: Weights, by their names in a folder, that may be present as well.

        Raises:
            InvalidArgumentError: Tensors are missing, unexpected, or of another shape or type.
        """
        wanted = {self._name(part.name): part.shape for part in parts}
        if missing := sorted(wanted.keys() - self._file.tensors):
            raise self._fault(f"{_listed(missing)} missing; it is not the whole model: fetch it again")
        allowed = {ROPE_FACTORS, *map(self._name, ignored)}
        if surplus := sorted(self._file.tensors.keys() - wanted - allowed):
            raise self._fault(f"{_listed(surplus)} not part of the model, which is of a kind that is not supported")
        for name, shape in wanted.items():
            tensor = self._file.tensors[name]
            if tensor.shape != shape:
                raise self._fault(
                    f"'{name}' must have shape {list(shape)}, got {list(tensor.shape)}; convert the model again"
                )
            block_type = BLOCK_TYPES.get(tensor.type_id)
            if block_type is None or (block_type.dtype is None and len(shape) == 1):
                names = ", ".join(each.name for each in BLOCK_TYPES.values() if len(shape) > 1 or each.dtype)
                got = block_type.name if block_type else f"number {tensor.type_id}"
                raise self._fault(f"'{name}' must have one of the types {names}, got {got}; convert the model to one")
            if shape[-1] % block_type.num_elements:
                raise self._fault(
                    f"'{name}' of type {block_type.name} must have a multiple of {block_type.num_elements} inputs, got "
                    f"{shape[-1]}; convert the model again"
                )
            self._file.check_size(name, _num_bytes(block_type, shape))

    def is_quantized(self, part: Part) -> bool:
        """Whether the weight has codes."""
        return BLOCK_TYPES[self._file.tensors[self._name(part.name)].type_id].dtype is None

    def read(self, part: Part) -> torch.Tensor | QuantizedWeight:
        """The weight, on the CPU; numbers in the type that they are stored in."""
        name = self._name(part.name)
        tensor = self._file.tensors[name]
        block_type = BLOCK_TYPES[tensor.type_id]
        data = torch.from_numpy(self._file.read(tensor, _num_bytes(block_type, part.shape)))
        if self._layout.has_pairs and (".attn_q." in name or ".attn_k." in name):
            data = self._in_halves(data.view(part.shape[0], -1)).flatten()
        weight = to_weight(block_type, data, part.shape)
        if self._layout.norm_offset and isinstance(weight, torch.Tensor) and is_norm(name):
            return weight - self._layout.norm_offset
        return weight

    def _name(self, name: str) -> str:
        """Name in the file of a tensor of a Hugging Face folder."""
        module, _, kind = name.rpartition(".")
        if module in _WHOLE:
            return f"{_WHOLE[module]}.{kind}"
        layer = _LAYER.fullmatch(module)
        if layer is None:
            return name
        return f"blk.{layer[1]}.{self._names.get(layer[2], layer[2])}.{kind}"

    def _in_halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs of each head in Hugging Face's order, halves of the head, and not in pairs as llama.cpp's Llama."""
        pairs = rows.view(-1, self._head_dim // 2, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _fault(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._file.name}: {problem}")


def _num_bytes(block_type: BlockType, shape: tuple[int, ...]) -> int:
    return prod(shape) // block_type.num_elements * block_type.num_bytes


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"{', '.join(repr(name) for name in names[:_NUM_NAMED])}{more} {'is' if len(names) == 1 else 'are'}"
