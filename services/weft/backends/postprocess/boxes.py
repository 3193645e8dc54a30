"""Bounding boxes: overlap and greedy non-maximum suppression."""

import numpy as np

from weft.base.tensors import Array

# Boxes of a row processed at once, and pairs whose overlap is computed at once: both bound memory.
_BLOCK = 128
_MAX_PAIRS = 2**20


def xyxy_from_cxcywh(boxes: Array) -> Array:
    """Convert ``cxcywh`` to ``xyxy``, both ``[..., 4]``."""
    half = boxes[..., 2:] / 2
    return np.concatenate([boxes[..., :2] - half, boxes[..., :2] + half], axis=-1)


def non_max_suppression(boxes: Array, groups: Array, is_valid: Array, *, iou_threshold: float, limit: int) -> Array:
    """Greedy non-maximum suppression: which boxes are kept.

    From first to last, a box is kept unless its overlap with a kept one of its group exceeds the threshold.

    Args:
        boxes: float32 ``[num_rows, K, 4]`` as x1, y1, x2, y2, best first.
        groups: ``[num_rows, K]``; boxes of different groups do not suppress each other.
        is_valid: bool ``[num_rows, K]``; invalid boxes are neither kept nor suppress others.
        iou_threshold: Overlap is area of the intersection by area of the union; 0 if both are empty.
        limit: Results are correct up to this many kept boxes per row, and arbitrary behind them.

    Returns:
        bool ``[num_rows, K]``.
    """
    step = max(1, _MAX_PAIRS // (_BLOCK * max(_BLOCK, limit)))
    keeps = np.zeros_like(is_valid)
    for start in range(0, len(boxes), step):
        part = slice(start, start + step)
        _suppress_rows(boxes[part], groups[part], is_valid[part], keeps[part], iou_threshold, limit)
    return keeps


def _suppress_rows(
    boxes: Array, groups: Array, is_valid: Array, keeps: Array, iou_threshold: float, limit: int
) -> None:
    """Fill ``keeps`` block by block: first against boxes kept in earlier blocks, then within the block."""
    for start in range(0, boxes.shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        num_kept = keeps[:, :start].sum(axis=1)
        if num_kept.min(initial=limit) >= limit:
            return
        candidates, own_groups, is_open = boxes[:, block], groups[:, block], is_valid[:, block]
        if start:
            earlier = np.argsort(~keeps[:, :start], axis=1, kind="stable")[:, : min(limit, num_kept.max())]
            suppresses = _suppresses(
                np.take_along_axis(boxes, earlier[:, :, None], axis=1),
                np.take_along_axis(groups, earlier, axis=1),
                candidates,
                own_groups,
                iou_threshold,
            )
            suppresses &= np.take_along_axis(keeps, earlier, axis=1)[:, :, None]
            is_open = is_open & ~suppresses.any(axis=1)
        suppresses = np.triu(_suppresses(candidates, own_groups, candidates, own_groups, iou_threshold), 1)
        keeps[:, block] = _greedy(suppresses, is_open)


def _greedy(suppresses: Array, is_open: Array) -> Array:
    """The unique selection in which an open box is kept iff no kept box before it suppresses it.

    Fixed-point iteration: each round settles all boxes whose suppressors are settled, so the number of rounds is the
    length of the longest chain of suppressions, usually three or four.

    Args:
        suppresses: bool ``[num_rows, j, i]``: whether j, if kept, suppresses i; only for j before i.
        is_open: bool ``[num_rows, i]``.

    Returns:
        bool ``[num_rows, i]``.
    """
    keeps = is_open
    while True:
        changed = is_open & ~(suppresses & keeps[:, :, None]).any(axis=1)
        if (changed == keeps).all():
            return changed
        keeps = changed


def _suppresses(boxes: Array, groups: Array, candidates: Array, other_groups: Array, iou_threshold: float) -> Array:
    """Whether each pair is of one group and overlaps above the threshold: bool ``[num_rows, boxes, candidates]``."""
    x1, y1, x2, y2 = (boxes[:, :, None, i] for i in range(4))
    u1, v1, u2, v2 = (candidates[:, None, :, i] for i in range(4))
    intersections = np.maximum(np.minimum(x2, u2) - np.maximum(x1, u1), 0)
    intersections *= np.maximum(np.minimum(y2, v2) - np.maximum(y1, v1), 0)
    areas = np.maximum(x2 - x1, 0) * np.maximum(y2 - y1, 0)
    other_areas = np.maximum(u2 - u1, 0) * np.maximum(v2 - v1, 0)
    # Without a division: both sides are 0 where the union is empty.
    is_over: Array = intersections > iou_threshold * (areas + other_areas - intersections)
    is_over &= groups[:, :, None] == other_groups[:, None, :]
    return is_over
