"""What each rank has of a model: whether sizes fit it, and which rows and columns of its weights a tensor rank has.

Imports no torch, because capacity planning asks it too.
"""

from collections.abc import Sequence

from weft.base.errors import InvalidArgumentError
from weft.llm.models.foreign import ForeignConfig
from weft.llm.models.model_config import TransformerConfig
from weft.llm.parallel.topology import ParallelSizes
from weft.llm.weights.parts import EMBEDDING, LM_HEAD, Part, Piece, fused_shape, is_of_experts


def check_sizes(config: TransformerConfig, sizes: ParallelSizes) -> None:
    """Raise InvalidArgumentError unless the model can be divided among so many ranks."""
    if isinstance(config, ForeignConfig):
        if sizes.num_ranks != 1:
            raise InvalidArgumentError(
                f"tensor_parallel_size, pipeline_parallel_size and context_parallel_size must be 1 for {config.name}, "
                f"which runs through transformers, got {', '.join(map(str, sizes))}; remove them, or take a model that "
                f"has a module in Weft"
            )
        return
    allowed = [size for size in range(1, config.num_heads + 1) if _is_divisible(config, size)]
    if sizes.tensor not in allowed:
        counts = ", ".join(f"{name} = {value}" for name, value in config.divided.items())
        raise InvalidArgumentError(
            f"tensor_parallel_size must be one of {', '.join(map(str, allowed))} for this {config.name}, got "
            f"{sizes.tensor}: it divides {counts}, and it divides num_key_value_heads = {config.num_kv_heads} or is a "
            f"multiple of that; change it, or take pipeline_parallel_size for the other GPUs"
        )
    if not 1 <= sizes.pipeline <= config.num_layers:
        raise InvalidArgumentError(
            f"pipeline_parallel_size must be from 1 to num_hidden_layers = {config.num_layers}, got {sizes.pipeline}; "
            f"lower it"
        )


class Shard:
    """Which rows and columns of each weight one of ``size`` tensor ranks has.

    Queries, keys, values, gates and ups are divided by outputs, so heads stay whole; experts by their number; embedding
    and LM head by tokens. The products after them, ``o_proj`` and ``down_proj``, are divided by their inputs, which a
    rank has, or by outputs where codes or bitwise equality forbid to add partial sums. All else is on every rank.
    """

    def __init__(self, config: TransformerConfig, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim

    def pieces(self, name: str, parts: Sequence[Part], *, by_outputs: bool = False) -> list[Piece]:
        """The rank's pieces of the ``parts`` of the weight ``name``; ``by_outputs``: so is one after others divided."""
        if self._size == 1:
            return [Piece(part) for part in parts]
        if is_second(name) and not by_outputs:
            return [Piece(part, (slice(0, part.shape[0]),), self._own(part.shape[1])) for part in parts]
        found, first, ranges = [], 0, self._rows(name, fused_shape(list(parts))[0])
        for part in parts:
            end = first + part.shape[0]
            inside = ((max(rows.start, first), min(rows.stop, end)) for rows in ranges)
            own = tuple(slice(start - first, stop - first) for start, stop in inside if start < stop)
            found += [Piece(part, own)] if own else []
            first = end
        return found

    def _rows(self, name: str, num_rows: int) -> list[slice]:
        module = name.rpartition(".")[0]
        if name in (EMBEDDING, LM_HEAD):
            return [self.tokens(num_rows)]
        if module.endswith("qkv_proj"):
            return [self._own(self._num_heads * self._head_dim), *self._own_keys()]
        if is_of_experts(name) or is_second(name) or name.endswith(".sinks"):
            return [self._own(num_rows)]
        if module.endswith("gate_up_proj"):
            gates = self._own(num_rows // 2)
            return [gates, slice(gates.start + num_rows // 2, gates.stop + num_rows // 2)]
        return [slice(0, num_rows)]

    def tokens(self, vocab_size: int) -> slice:
        """The rank's part of the vocabulary; the last has fewer where it cannot be divided evenly."""
        most = -(-vocab_size // self._size)
        return slice(self._rank * most, min((self._rank + 1) * most, vocab_size))

    def _own(self, total: int, rank: int | None = None, size: int | None = None) -> slice:
        rank, each = self._rank if rank is None else rank, total // (size or self._size)
        return slice(rank * each, (rank + 1) * each)

    def _own_keys(self) -> list[slice]:
        """Rows of keys and of values, behind those of queries; ranks share a head where there are fewer."""
        num_parts = min(self._size, self._num_kv_heads)
        width, first = self._num_kv_heads * self._head_dim, self._num_heads * self._head_dim
        own = self._own(width, self._rank * num_parts // self._size, num_parts)
        return [slice(own.start + place, own.stop + place) for place in (first, first + width)]


def is_second(name: str) -> bool:
    """Whether the matrix multiplies what another gives: its inputs are the outputs of a rank."""
    return name.endswith(("o_proj.weight", "down_proj.weight")) and not is_of_experts(name)


def _is_divisible(config: TransformerConfig, size: int) -> bool:
    most = -(-config.vocab_size // size)  # tokens of a rank; the last may have fewer
    has_heads = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    return has_heads and most * (size - 1) < config.vocab_size and not any(n % size for n in config.divided.values())
