"""Blocks of admitted sequences that the current step loads from the second tier: ``PendingLoads``."""

from collections.abc import Collection, Iterable

from weft.llm.scheduler.blocks import OFFLOADED, BlockPool
from weft.llm.scheduler.sequence import Sequence


class PendingLoads:
    """Gives admitted sequences their tables, and puts loaded blocks into the index once they are known to be good.

    Until then nobody else can find them, so a load that fails concerns one sequence, which is computed instead.

    Args:
        pool: The blocks, and the tier.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._indices: dict[Sequence, list[int]] = {}  # of loaded blocks in the table
        self._hashes: set[bytes] = set()

    def awaits(self, cached: list[int], hashes: Iterable[bytes]) -> bool:
        """Whether another sequence loads a block of the matched table ``cached``, which has these ``hashes``."""
        if not self._hashes:
            return False
        pairs = zip(cached, hashes, strict=False)
        return any(block == OFFLOADED and block_hash in self._hashes for block, block_hash in pairs)

    def begin(self, seq: Sequence, cached: list[int], num_new: int) -> list[int]:
        """The table of ``seq``, which is being admitted.

        Args:
            seq: The sequence.
            cached: Its matched table, of which the blocks of the pool are acquired.
            num_new: Blocks to allocate, those to be loaded included.
        """
        pool, tier = self._pool, self._pool.tier
        indices = [index for index, block in enumerate(cached) if block == OFFLOADED] if tier.num_slots else []
        tier.pin(seq.hashes[index] for index in indices)  # what is allocated now may be saved, and evict them
        new = pool.allocate(num_new)
        table = cached + new[len(indices) :]
        for index, block in zip(indices, new, strict=False):
            table[index] = block
            tier.load(block, seq.hashes[index])
            self._hashes.add(seq.hashes[index])
        if indices:
            self._indices[seq] = indices
        return table

    def cancel(self, seq: Sequence) -> None:
        """Load nothing for ``seq``, which is about to lose its blocks."""
        for index in self._indices.pop(seq, ()):
            self._pool.tier.cancel_load(seq.block_table[index])
            self._hashes.discard(seq.hashes[index])

    def finish(self, failed: Collection[int]) -> list[Sequence]:
        """The loads of the step are done.

        Args:
            failed: Blocks whose load failed.

        Returns:
            The sequences that own such blocks; their first ``num_cached`` tokens at most were found.
        """
        lost = []
        for seq, indices in self._indices.items():
            bad = [index for index in indices if seq.block_table[index] in failed]
            for index in bad:
                self._pool.tier.fail(seq.hashes[index])
            for index in indices:
                if index not in bad:
                    self._pool.commit(seq.block_table[index], seq.hashes[index])
            if bad:
                seq.num_cached = min(seq.num_cached, bad[0] * self._pool.block_size)
                lost.append(seq)
        self._indices.clear()
        self._hashes.clear()
        return lost
