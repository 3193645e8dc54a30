"""Reads weights from a GGUF file."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from weft.base.errors import InvalidArgumentError
from weft.llm.weights.codes import cut
from weft.llm.weights.gguf import ROPE_FACTORS, GgufFile, GgufLayout
from weft.llm.weights.parts import Part, Piece, is_norm, listed
from weft_kernels.linear.quantized import QuantizedWeight, pack

#: Codes of one group, uint8 ``[N, groups, group_size]``; scales float32 ``[N, groups]``; minima alike, or None.
_Codes = tuple[Tensor, Tensor, Tensor | None]
_CENTER = {4: 8, 8: 128}


class BlockType(NamedTuple):
    """A block type of tensors.

    Attributes:
        num_elements: Of a block.
        dtype: Of plain numbers; None for codes.
        num_bits: Of the resulting codes.
        decode: From uint8 ``[N, blocks, num_bytes]`` to codes.
    """

    name: str
    num_elements: int
    num_bytes: int
    dtype: torch.dtype | None = None
    num_bits: int = 0
    decode: Callable[[Tensor], _Codes] | None = None


def to_weight(block_type: BlockType, data: Tensor, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
    """Decode a weight from its bytes, uint8, row by row; a quantised one has a two-dimensional ``shape``."""
    if block_type.decode is None:
        return data.view(block_type.dtype or torch.float32).view(shape)
    outputs, inputs = shape
    codes, scales, minima = block_type.decode(data.view(outputs, -1, block_type.num_bytes))
    group_size = codes.shape[2]
    zeros = None
    if minima is not None:
        # a group without a scale is its minimum everywhere
        is_flat = scales == 0
        codes = codes.masked_fill(is_flat.unsqueeze(2), 0)
        zeros = torch.where(is_flat, (minima != 0).float(), minima / scales)
        scales = torch.where(is_flat, minima, scales).contiguous()
    return QuantizedWeight(
        codes=pack(codes.view(outputs, inputs).t(), block_type.num_bits),
        scales=scales.t().contiguous(),
        zeros=None if zeros is None else zeros.t().contiguous(),
        group_size=group_size,
        shape=(outputs, inputs),
        num_bits=block_type.num_bits,
    )


def _half(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    return torch.cat((data & 15, data >> 4), -1)


def _bits(data: Tensor) -> Tensor:
    """0 or 1 for each bit, the lowest of the first byte first: ``[..., n]`` to ``[..., 8 n]``."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (data.unsqueeze(-1) >> shifts & 1).flatten(-2)


def _q4_0(data: Tensor) -> _Codes:
    return _nibbles(data[..., 2:]), _half(data[..., :2])[..., 0], None


def _q4_1(data: Tensor) -> _Codes:
    pair = _half(data[..., :4])
    return _nibbles(data[..., 4:]), pair[..., 0], -pair[..., 1]


def _q5_0(data: Tensor) -> _Codes:
    codes = _nibbles(data[..., 6:]) | _bits(data[..., 2:6]) << 4
    return codes + (_CENTER[8] - 16), _half(data[..., :2])[..., 0], None


def _q5_1(data: Tensor) -> _Codes:
    pair = _half(data[..., :4])
    return _nibbles(data[..., 8:]) | _bits(data[..., 4:8]) << 4, pair[..., 0], -pair[..., 1]


def _q8_0(data: Tensor) -> _Codes:
    return data[..., 2:] ^ _CENTER[8], _half(data[..., :2])[..., 0], None


def _k_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the 8 groups of a block, float32 ``[N, blocks, 8]``, from its first 16 bytes.

    They are codes of 6 bits: of the first four groups in the low bits of 8 bytes, of the others in the halves of 4
    bytes and the 2 high bits of those before.
    """
    pair, packed = _half(data[..., :4]), data[..., 4:16]
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), -1)
    return pair[..., :1] * scales.float(), pair[..., 1:] * minima.float()


def _by_group(blocks: Tensor) -> Tensor:
    """``[N, blocks, groups, ...]`` with all groups of a row along one axis."""
    return blocks.flatten(1, 2)


def _q4_k(data: Tensor) -> _Codes:
    scales, minima = _k_scales(data)
    codes = _nibbles(data[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    return _by_group(codes), scales.flatten(1), minima.flatten(1)


def _q5_k(data: Tensor) -> _Codes:
    scales, minima = _k_scales(data)
    codes = _nibbles(data[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    high = data[..., 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    return _by_group(codes | high << 4), scales.flatten(1), minima.flatten(1)


def _q6_k(data: Tensor) -> _Codes:
    low = _nibbles(data[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # of 4 times 32 elements, twice
    high = data[..., 128:192].unflatten(-1, (2, 32)).unsqueeze(-2) >> torch.arange(0, 8, 2, dtype=torch.uint8).view(
        4, 1
    )
    codes = (low | (high & 3) << 4) + (_CENTER[8] - 32)
    scales = _half(data[..., 208:]) * data[..., 192:208].contiguous().view(torch.int8).float()
    return _by_group(codes.flatten(2).unflatten(-1, (16, 16))), scales.flatten(1), None


#: Types that are read, by their number in the file.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, torch.float32),
    1: BlockType("F16", 1, 2, torch.float16),
    2: BlockType("Q4_0", 32, 18, None, 4, _q4_0),
    3: BlockType("Q4_1", 32, 20, None, 4, _q4_1),
    6: BlockType("Q5_0", 32, 22, None, 8, _q5_0),
    7: BlockType("Q5_1", 32, 24, None, 8, _q5_1),
    8: BlockType("Q8_0", 32, 34, None, 8, _q8_0),
    12: BlockType("Q4_K", 256, 144, None, 4, _q4_k),
    13: BlockType("Q5_K", 256, 176, None, 8, _q5_k),
    14: BlockType("Q6_K", 256, 210, None, 8, _q6_k),
    30: BlockType("BF16", 1, 2, torch.bfloat16),
}


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
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
#: One of the experts of a layer, which are one tensor in the file.
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class GgufSource:
    """Reads weights one at a time. Created by ``open``."""

    format_name = "gguf"  # for the log

    def __init__(self, file: GgufFile, layout: GgufLayout, head_dim: int) -> None:
        self._file = file
        self._layout = layout
        self._names = {**_OF_LAYER, **layout.names}
        self._head_dim = head_dim

    @classmethod
    @contextmanager
    def open(cls, path: Path, layout: GgufLayout, head_dim: int) -> Iterator[Self]:
        """Open the file; leaving the ``with`` block closes it. Raises as ``GgufFile.open``."""
        with GgufFile.open(path) as file:
            yield cls(file, layout, head_dim)

    def check(self, parts: Iterable[Part], ignored: Iterable[str]) -> None:
        """Validate the tensors of all ``parts`` before any is read; ``ignored`` ones may be present as well.

        Raises:
            InvalidArgumentError: Tensors are missing, unexpected, or of another shape or type.
        """
        wanted: dict[str, tuple[int, ...]] = {}
        for part in parts:
            whole, index = _whole(part.name)
            wanted[self._name(whole)] = part.shape if index is None else (index + 1, *part.shape)
        if missing := sorted(wanted.keys() - self._file.tensors):
            raise self._fault(f"{listed(missing)} missing; it is not the whole model: fetch it again")
        allowed = {ROPE_FACTORS, *map(self._name, ignored)}
        if surplus := sorted(self._file.tensors.keys() - wanted - allowed):
            raise self._fault(f"{listed(surplus)} not part of the model, which is of a kind that is not supported")
        for name, shape in wanted.items():
            tensor = self._file.tensors[name]
            if shape not in {tensor.shape, (1, *tensor.shape)}:
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
        """Whether the weight is quantised."""
        return BLOCK_TYPES[self._file.tensors[self._name(_whole(part.name)[0])].type_id].dtype is None

    def read(self, piece: Piece) -> torch.Tensor | QuantizedWeight:
        """The piece of a weight, on the CPU; unquantised ones in their stored type."""
        part = piece.part
        whole, index = _whole(part.name)
        name = self._name(whole)
        tensor = self._file.tensors[name]
        block_type = BLOCK_TYPES[tensor.type_id]
        num_bytes = _num_bytes(block_type, part.shape)
        tensor = tensor._replace(offset=tensor.offset + (index or 0) * num_bytes)
        data = torch.from_numpy(self._file.read(tensor, num_bytes))
        if self._layout.has_pairs and (".attn_q." in name or ".attn_k." in name):
            data = self._in_halves(data.view(part.shape[0], -1)).flatten()
        weight = cut(to_weight(block_type, data, part.shape), piece)
        if self._layout.norm_offset and isinstance(weight, torch.Tensor) and is_norm(name):
            return weight - self._layout.norm_offset
        return weight

    def _name(self, name: str) -> str:
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


def _whole(name: str) -> tuple[str, int | None]:
    """Name without the index of an expert, and the index."""
    found = _EXPERT.fullmatch(name)
    return (found[1] + found[3], int(found[2])) if found else (name, None)


def _num_bytes(block_type: BlockType, shape: tuple[int, ...]) -> int:
    return prod(shape) // block_type.num_elements * block_type.num_bytes
