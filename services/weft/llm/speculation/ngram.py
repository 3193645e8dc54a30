"""``NgramProposer``: drafts repeat what followed an earlier occurrence of the last tokens."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Shortest repetition that is worth a guess, in tokens; the index finds places where this many tokens recur.
_MIN_MATCH = 2
#: A repetition this long is taken without a search for a longer one.
_MAX_MATCH = 16
#: Most earlier places that are compared in a step, the latest first.
_MAX_PLACES = 16
_MAX_BUCKETS = 1 << 16
#: From this many new tokens on, numpy indexes faster than Python does.
_BULK = 64
_FACTORS = (2654435761, 40503)
_SHIFT = 7


class NgramProposer:
    """Finds the longest match of the last tokens in prompt and output so far, and proposes what followed it.

    Good if the output repeats its input: quotes, edits, code, retrieved text. A match that reaches the end is continued
    with its own drafts, for periodic repetitions.

    The index is a hash chain, as in compressors: heads by the hash of two tokens, and for each position the one before
    it with the same hash. It grows by O(1) per token. Memory: 4 bytes per token, and up to 256 KiB of heads.

    Source:
        Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding; Inference with Reference,
        https://arxiv.org/abs/2304.04487.
    """

    def __init__(self, max_len: int) -> None:
        num_buckets = 1 << min(max(max_len, 1).bit_length(), _MAX_BUCKETS.bit_length() - 1)
        self._mask = num_buckets - 1
        self._heads = array("i", [-1]) * num_buckets
        self._before = array("i")

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return len(self._heads) * self._heads.itemsize + len(self._before) * self._before.itemsize

    def propose(self, tokens: "array[int]", num_drafts: int) -> Sequence[int]:
        """See ``Proposer``."""
        self._index(tokens)
        place = self._longest_match(tokens)
        if place < 0:
            return []
        drafts = tokens[place + 1 : place + 1 + num_drafts].tolist()
        for index in range(num_drafts - len(drafts)):
            drafts.append(drafts[index])
        return drafts

    def _longest_match(self, tokens: "array[int]") -> int:
        """Position of the last token of the longest match, the latest of several; -1: there is none."""
        last = len(tokens) - 1
        place = self._before[last]
        best, best_len = -1, _MIN_MATCH - 1
        for _ in range(_MAX_PLACES):
            if place < 0:
                break
            length = 0
            while length < _MAX_MATCH and length <= place and tokens[place - length] == tokens[last - length]:
                length += 1
            if length > best_len:
                best, best_len = place, length
                if length == _MAX_MATCH:
                    break
            place = self._before[place]
        return best

    def _index(self, tokens: "array[int]") -> None:
        before, heads, mask = self._before, self._heads, self._mask
        if not before:
            before.append(-1)  # no two tokens end at the first position
        first = len(before)
        if len(tokens) - first >= _BULK:
            self._index_bulk(np.array(tokens[first - 1 :], np.uint64), first)
            return
        for position in range(first, len(tokens)):
            bucket = ((tokens[position - 1] * _FACTORS[0] + tokens[position] * _FACTORS[1]) >> _SHIFT) & mask
            before.append(heads[bucket])
            heads[bucket] = position

    def _index_bulk(self, tokens: npt.NDArray[np.uint64], first: int) -> None:
        """Add the positions from ``first`` on; ``tokens`` begin one before it."""
        factors = np.array(_FACTORS, np.uint64)
        buckets = (tokens[:-1] * factors[0] + tokens[1:] * factors[1]) >> np.uint64(_SHIFT)
        buckets = (buckets & np.uint64(self._mask)).astype(np.int64)
        heads = np.frombuffer(self._heads, np.int32)
        order = np.argsort(buckets, kind="stable")
        in_order = buckets[order]
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = in_order[1:] != in_order[:-1]
        before = np.empty(len(order), np.int32)
        before[order] = np.where(is_first, heads[in_order], np.roll(order, 1) + first)
        is_last = np.roll(is_first, -1)
        heads[in_order[is_last]] = (order[is_last] + first).astype(np.int32)
        self._before.frombytes(before.tobytes())
