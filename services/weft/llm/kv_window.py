"""Blocks that a model with sliding-window attention still reads: ``KvWindow``."""

from typing import NamedTuple

from weft.llm.config import EngineConfig, TransformerConfig


class KvWindow(NamedTuple):
    """Which blocks of a sequence no later token reads, and how many it needs at most.

    A token at position p reads the keys of positions ``p - num_tokens + 1`` to p. One more is kept, because a fork
    computes the last token of its parent's prompt again.

    Attributes:
        num_tokens: The widest window of all layers; 0: some layer reads all tokens, so that no block is ever behind.
        block_size: Tokens of a block.
        num_step_tokens: Most tokens that one step computes for a sequence.
    """

    num_tokens: int = 0
    block_size: int = 1
    num_step_tokens: int = 1

    def num_behind(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token from position ``num_computed_tokens`` on reads."""
        return max(num_computed_tokens - self.num_tokens, 0) // self.block_size if self.num_tokens else 0

    def num_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of up to ``num_tokens`` tokens owns at a time."""
        whole = -(-num_tokens // self.block_size)
        if not self.num_tokens:
            return whole
        # The window with the token that is kept and a step lie anywhere on the grid of blocks.
        return min(whole, -(-(self.num_tokens + self.num_step_tokens) // self.block_size) + 1)

    def table_len(self, num_tokens: int, num_behind: int) -> int:
        """Entries in the table of a sequence of ``num_tokens`` tokens of which ``num_behind`` blocks are behind."""
        return min(-(-num_tokens // self.block_size), num_behind + self.num_blocks(num_tokens))

    def max_len(self, max_model_len: int, num_blocks: int) -> int:
        """Longest sequence, prompt and output, in tokens, that ``num_blocks`` blocks can hold."""
        return max_model_len if self.num_blocks(max_model_len) <= num_blocks else num_blocks * self.block_size


def kv_window(config: EngineConfig, model: TransformerConfig) -> KvWindow:
    """The window of an engine's sequences: the widest of the model's layers, none if one of them has none."""
    windows = model.windows
    return KvWindow(max(windows) if all(windows) else 0, config.block_size, config.max_num_batched_tokens)
