"""Whether a waiting sequence gets a seat and blocks now, and who makes room for it: ``BlockAdmission``."""

import math
from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np

from weft_model.llm.scheduler.blocks import BlockPool
from weft_model.llm.scheduler.ranking import Ranking
from weft_model.llm.scheduler.sequence import Sequence

#: Weight of the last output in the expected length of outputs.
_SMOOTHING = 0.05


class BlockAdmission:
    """Rules of admission over one pool.

    A sequence is admitted if the blocks for all its known tokens are there with a watermark to spare, and if it and the
    running sequences are not expected to need more than all blocks at any time until they end. Who would make room for
    it does not count against it; alone it is always admitted.

    Args:
        pool: The blocks.
        ranking: Who is strictly better than whom.
        watermark: Part of all blocks to keep free.
    """

    def __init__(self, pool: BlockPool, ranking: Ranking, watermark: float) -> None:
        self._pool = pool
        self._ranking = ranking
        self._num_spare = math.ceil(watermark * pool.capacity)
        self._expected_output = math.inf

    def learn(self, num_output: int) -> None:
        """A sequence finished with so many new tokens."""
        if math.isinf(self._expected_output):
            self._expected_output = num_output
        else:
            self._expected_output += _SMOOTHING * (num_output - self._expected_output)

    def has_spare_blocks(self, num_blocks: int) -> bool:
        """Whether so many more can go without touching the watermark."""
        return self._pool.num_free >= self._num_spare + num_blocks

    def victims(
        self,
        seq: Sequence,
        num_new: int,
        *,
        has_seat: bool,
        others: Seq[Sequence],
        worse: Seq[Sequence],
        kept: Collection[int],
    ) -> list[Sequence] | None:
        """Who must be preempted so that ``seq`` can be admitted: just enough, the worst first; None: it cannot be.

        Args:
            seq: Its cached blocks are acquired already.
            num_new: Blocks that it needs besides.
            has_seat: A seat is free.
            others: Running sequences than which ``seq`` is not strictly better.
            worse: All other running sequences.
            kept: Blocks that will not be free in this step, whoever goes.
        """
        num_needed = num_new + (self._num_spare if others else 0)
        num_free = self._pool.num_free
        victims: list[Sequence] = []
        if num_free < num_needed or not has_seat:
            owners: Counter[int] = Counter()
            for victim in sorted(worse, key=self._ranking.badness, reverse=True):
                victims.append(victim)
                for block in victim.table:
                    owners[block] += 1
                    num_free += owners[block] == self._pool.num_owners(block) and block not in kept
                if num_free >= num_needed:
                    break
            if num_free < num_needed or not (has_seat or victims):
                return None
        is_room_doubtful = bool(others) and self._most_blocks(num_new, len(others)) > self._pool.capacity
        if is_room_doubtful and self._peak_blocks(seq, num_new, others, worse) > self._pool.capacity:
            return None
        return victims

    def _most_blocks(self, num_new: int, num_others: int) -> float:
        """An upper bound of ``_peak_blocks`` that costs nothing: as if all outputs were to come and nobody ended."""
        return self._pool.num_used + num_new + (num_others + 1) * (self._expected_output / self._pool.block_size + 1)

    def _peak_blocks(self, seq: Sequence, num_new: int, others: Seq[Sequence], worse: Seq[Sequence]) -> int:
        """Most blocks that ``others`` and ``seq`` are expected to own together.

        Sequences end in the order of what remains for them. When the k-th from the end does, it and the k-1 that go on
        have each grown by what remained for it; the largest sum over k is the peak.

        Source:
            https://github.com/ModelTC/lightllm, the token estimate of its router; here in blocks.
        """
        pool, block_size = self._pool, self._pool.block_size
        left = np.array([other.max_len - len(other.tokens) for other in (*others, seq)], np.float64)
        owned = [len(other.table) - other.num_cached // block_size for other in others]
        owned_by_worse = sum(len(other.table) - other.num_cached // block_size for other in worse)
        # What several own, such as a common prefix, is counted once and for all the time.
        num_common = max(pool.num_used - sum(owned) - owned_by_worse, 0)
        order = np.argsort(-left, kind="stable")
        growth = np.ceil(np.minimum(left[order], self._expected_output) / block_size) * np.arange(1, len(left) + 1)
        return num_common + int((np.cumsum(np.array([*owned, num_new])[order]) + growth).max())
