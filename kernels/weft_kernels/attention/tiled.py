"""Batch-invariant attention over a paged KV cache, in torch; see ``reference``."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.blocks.layout import gather_half

ROWS_PER_TILE = 16
KEYS_PER_TILE = 64
# Finite substitute for minus infinity: avoids NaN when the maximum of an empty row is subtracted.
_NOTHING = -1e30


def tiled_attention(
    q: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    q_start: Tensor,
    ctx_len: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    step_cache: dict[str, Any] | None,
) -> Tensor:
    """``reference.paged_attention`` with ``deterministic``; same arguments and result.

    BLAS orders its sums by the shape of a product. Here every product is 16 rows by 64 keys, with the rows of a
    sequence padded with zeros and the keys counted from position 0, and a tile of keys that a row does not see leaves
    its sums unchanged. So a row's result depends neither on the batch nor on its chunk.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_layer.shape[2:4]
    group_size = num_heads // num_kv_heads
    cache = {} if step_cache is None else step_cache
    tiles: _Tiles | None = cache.get("tiled_attention")
    if tiles is None:
        tiles = cache["tiled_attention"] = _Tiles(block_tables, q_start.long(), ctx_len.long(), group_size, block_size)

    queries = q.new_zeros(tiles.count * ROWS_PER_TILE, num_kv_heads, head_dim, dtype=torch.float32)
    queries[tiles.rows] = q.view(num_tokens, num_kv_heads, group_size, head_dim).transpose(1, 2).flatten(0, 1).float()
    queries = queries.mul_(scale).unflatten(0, (tiles.count, -1)).transpose(1, 2).contiguous()
    out = torch.zeros_like(queries)
    row_max = queries.new_full((tiles.count, num_kv_heads, ROWS_PER_TILE, 1), _NOTHING)
    row_sum = torch.zeros_like(row_max)
    if sinks is not None:
        of_rows = queries.new_full((tiles.count * ROWS_PER_TILE, num_kv_heads), _NOTHING)
        of_rows[tiles.rows] = sinks.view(num_kv_heads, group_size).T.repeat(num_tokens, 1)
        row_max = of_rows.view(tiles.count, ROWS_PER_TILE, num_kv_heads, 1).transpose(1, 2)
        row_sum.fill_(1.0)
    for keys_tile in tiles.of_keys:
        count = keys_tile.num_row_tiles
        keys, values = (
            gather_half(kv_layer, kv_scales, half, keys_tile.blocks).view(count, -1, num_kv_heads, head_dim)
            for half in (0, 1)
        )
        is_unseen = keys_tile.is_beyond
        if window:
            first = tiles.positions[:count, :1, None, None]
            is_unseen = is_unseen | (keys_tile.positions[:, None, None] <= first - window)
        values = values.float().masked_fill_(is_unseen, 0.0)  # a weight of 0 does not stop a NaN
        scores = _products(queries[:count], keys.float().permute(0, 2, 3, 1))
        if soft_cap:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        is_hidden = keys_tile.is_ahead
        if window:
            is_hidden = is_hidden | (keys_tile.positions <= tiles.positions[:count, None, :, None] - window)
        scores.masked_fill_(is_hidden, float("-inf"))
        new_max = torch.maximum(row_max[:count], scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_max).exp_()
        shrink = (row_max[:count] - new_max).exp_()
        row_max[:count] = new_max
        row_sum[:count].mul_(shrink).add_(weights.sum(-1, keepdim=True))
        out[:count].mul_(shrink).add_(_products(weights, values.transpose(1, 2)))
    out = out.div_(row_sum).transpose(1, 2).flatten(0, 1)[tiles.rows].to(q.dtype)
    return out.view(num_tokens, group_size, num_kv_heads, head_dim).transpose(1, 2).reshape(q.shape)


class _KeysTile(NamedTuple):
    """A tile of keys, and the first ``n`` tiles of rows, which have a row that sees one of them.

    Attributes:
        num_row_tiles: ``n``.
        blocks: The keys' blocks, row tile by row tile, shape ``[n * blocks_per_tile]``.
        positions: Positions of the keys, int64.
        is_beyond: Keys beyond the context, shape ``[n, keys_per_tile, 1, 1]``.
        is_ahead: Keys after a row's own position, shape ``[n, 1, 16, keys_per_tile]``.
    """

    num_row_tiles: int
    blocks: Tensor
    positions: Tensor
    is_beyond: Tensor
    is_ahead: Tensor


class _Tiles:
    """Rows of all sequences (one per token and query head of a group) in tiles of 16; longest context first.

    Attributes:
        count: Number of tiles.
        rows: Row of each token and head of a group, token by token, shape ``[T * group_size]``, int64.
        positions: Absolute position of each row, shape ``[count, 16]``, int64; 0 for padding rows.
        of_keys: The tiles of keys from position 0 on.
    """

    def __init__(
        self, block_tables: Tensor, q_start: Tensor, ctx_len: Tensor, group_size: int, block_size: int
    ) -> None:
        q_len = q_start.diff()
        num_tiles = (q_len * group_size + ROWS_PER_TILE - 1) // ROWS_PER_TILE
        sequences = torch.repeat_interleave(num_tiles)
        self.count = len(sequences)
        first_tile = num_tiles.cumsum(0) - num_tiles
        rows_before_end = (torch.arange(1, self.count + 1) - first_tile[sequences]) * ROWS_PER_TILE
        last_token = ((rows_before_end - 1) // group_size).minimum(q_len[sequences] - 1)
        last_position, order = ((ctx_len - q_len)[sequences] + last_token).sort(descending=True, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(self.count)

        sequence_of_token = torch.repeat_interleave(q_len)
        token = torch.arange(len(sequence_of_token)) - q_start[sequence_of_token]
        local = token.unsqueeze(1) * group_size + torch.arange(group_size)
        tile = place[first_tile[sequence_of_token].unsqueeze(1) + local // ROWS_PER_TILE]
        self.rows = (tile * ROWS_PER_TILE + local % ROWS_PER_TILE).flatten()
        positions = torch.zeros(self.count * ROWS_PER_TILE, dtype=torch.int64)
        positions[self.rows] = ((ctx_len - q_len)[sequence_of_token] + token).repeat_interleave(group_size)
        self.positions = positions.view(self.count, ROWS_PER_TILE)
        self.of_keys = self._keys_tiles(block_tables, sequences[order], ctx_len, last_position, block_size)

    def _keys_tiles(
        self, block_tables: Tensor, sequences: Tensor, ctx_len: Tensor, last_position: Tensor, block_size: int
    ) -> list[_KeysTile]:
        """The tiles of keys, where tile ``t`` of rows is of ``sequences[t]`` and sees up to ``last_position[t]``."""
        keys_per_tile = max(KEYS_PER_TILE, block_size)
        blocks_per_tile = keys_per_tile // block_size
        tables = functional.pad(block_tables, (0, -block_tables.shape[1] % blocks_per_tile))
        tables = tables.index_select(0, sequences).unflatten(1, (-1, blocks_per_tile))
        contexts = ctx_len[sequences]
        furthest = last_position // keys_per_tile
        num_tiles = int(furthest[0]) + 1 if self.count else 0
        counts = (furthest.unsqueeze(0) >= torch.arange(num_tiles).unsqueeze(1)).sum(1).tolist()
        tiles = []
        for index, count in enumerate(counts):
            positions = torch.arange(index * keys_per_tile, (index + 1) * keys_per_tile)
            tiles.append(
                _KeysTile(
                    count,
                    tables[:count, index].flatten(),
                    positions,
                    positions[:, None, None] >= contexts[:count, None, None, None],
                    positions > self.positions[:count, None, :, None],
                )
            )
        return tiles


def _products(left: Tensor, right: Tensor) -> Tensor:
    """``left[n, K, 16, a] @ right[n, K, a, b]``, laid out independently of ``n``, so that BLAS sums in one order."""
    count, num_kv_heads = left.shape[:2]
    product = torch.bmm(left.flatten(0, 1).contiguous(), right.flatten(0, 1).contiguous())
    return product.unflatten(0, (count, num_kv_heads))
