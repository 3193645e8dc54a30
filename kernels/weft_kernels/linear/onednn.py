"""Matrix products on a CPU with weights in oneDNN's blocked layout, and with 8-bit weights.

Milliseconds of CPU time of one product ``[rows, 768] @ [768, 4096]``, one thread of an EPYC with AVX-512 BF16 and VNNI,
torch 2.13, weights not in the cache:

| rows | float32, BLAS | float32, packed | bfloat16 | bfloat16, packed | int8, packed |
|---|---|---|---|---|---|
| 1 | 0.55 | 0.46 | 0.43 | 0.20 | 0.14 |
| 8 | 1.31 | 0.50 | 0.48 | 0.28 | 0.19 |
| 32 | 2.77 | 1.17 | 0.80 | 0.61 | 0.37 |
| 128 | 8.86 | 3.63 | 2.07 | 1.81 | 1.05 |
"""

from functools import cache

import torch
from torch import Tensor

from weft_kernels.processors import largest_code

#: Rows of one product in deterministic mode, at most.
ROWS_PER_TILE = 32
#: Operations of torch for its compiler's use; the version of torch is pinned.
_mkldnn = torch.ops.mkldnn
_onednn = torch.ops.onednn
_INT8_MAX = 127


def is_native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies packed weights of the type; False where oneDNN would be slower than BLAS or fail."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(_mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(_mkldnn._is_mkldnn_fp16_supported())
    return bool(dtype == torch.float32)


class PackedLinear:
    """``x @ weight.T + bias`` with a weight in oneDNN's blocked layout.

    Args:
        weight: Shape ``[out, in]``, on a CPU, of a type that ``is_native``. Copied.
        bias: Shape ``[out]`` of the same type; None for none. Not copied.
        deterministic: A row's result is bitwise independent of the other rows of the call. oneDNN orders the sums of a
            row alike in all products of 2 rows and more, which is checked here for every number of rows that is then
            used; a single row is computed twice. Where the check fails, every product has 32 rows, the rest zeros.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, deterministic: bool = False) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._bias = bias
        self._deterministic = deterministic
        with torch.no_grad():
            self._weight = _mkldnn._reorder_linear_weight(weight.contiguous(), None)
            self._pads = deterministic and not _is_invariant(self.shape, weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: Rows, shape ``[T, in]``, of the weight's type. Not modified.

        Returns:
            Shape ``[T, out]``, newly allocated.
        """
        num_rows = x.shape[0]
        if not num_rows:
            return x.new_empty(0, self.shape[0])
        if not self._deterministic:
            return self._product(x)
        if num_rows <= ROWS_PER_TILE:
            return self._tile(x)
        return torch.cat([self._tile(tile) for tile in x.split(ROWS_PER_TILE)])

    def _product(self, x: Tensor) -> Tensor:
        result: Tensor = _mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result

    def _tile(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if self._pads and num_rows < ROWS_PER_TILE:
            return self._product(torch.cat((x, x.new_zeros(ROWS_PER_TILE - num_rows, x.shape[1]))))[:num_rows]
        return self._product(x) if num_rows > 1 else self._product(x.expand(2, -1))[:1]


class Int8Linear:
    """``x @ weight.T + bias`` with 8-bit weights, one scale for each output, and activations rounded to 8 bits by row.

    The sums are exact integers, so a row's result is bitwise independent of the other rows of the call. The relative
    error of a product of normal numbers is 1.1 % (Frobenius norm); 1.7 % on a CPU without VNNI, where activations have
    7 bits.

    Args:
        weight: Shape ``[out, in]``, on a CPU, floating point. Copied.
        bias: Shape ``[out]``; None for none. Copied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._bias = None if bias is None else bias.float()
        exact = weight.float()
        self._scales = exact.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / _INT8_MAX
        rounded = (exact / self._scales.unsqueeze(1)).round_().to(torch.int8)
        self._weight = _onednn.qlinear_prepack(rounded, None)
        self._largest = largest_code()
        self._zero_points = _zeros(self.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: Rows, shape ``[T, in]``, floating point. Not modified.

        Returns:
            Shape ``[T, out]`` of the type of ``x``, newly allocated.
        """
        if not x.shape[0]:
            return x.new_empty(0, self.shape[0])
        exact = x.float()
        scales = exact.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny).div_(self._largest)
        # u8 x s8 is what VNNI has; s8 x s8 is 5,000 times slower in torch 2.13
        rounded = (exact / scales).round_().add_(self._largest + 1).to(torch.uint8)
        out = _multiply_codes(rounded, self._largest + 1, self._weight, self._scales, self._zero_points)
        out.mul_(scales)
        if self._bias is not None:
            out.add_(self._bias)
        return out.to(x.dtype)


def _multiply_codes(rows: Tensor, zero_point: int, weight: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
    """Rows of unsigned codes by a packed weight of signed ones, float32."""
    out: Tensor = _onednn.qlinear_pointwise(
        rows, 1.0, zero_point, weight, scales, zero_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


@cache
def _is_invariant(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the first and last rows of products of 2 to 32 rows are bitwise those of the product of 32."""
    generator = torch.Generator().manual_seed(0)
    multiply = PackedLinear(torch.randn(shape, generator=generator).to(dtype))
    rows = torch.randn(ROWS_PER_TILE, shape[1], generator=generator).to(dtype)
    whole = multiply(rows)
    return all(
        torch.equal(multiply(rows[:count]), whole[:count]) and torch.equal(multiply(rows[-count:]), whole[-count:])
        for count in range(2, ROWS_PER_TILE)
    )


@cache
def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)
