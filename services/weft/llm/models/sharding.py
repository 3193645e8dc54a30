"""What each rank has of a model: whether sizes fit it, and which rows and columns of its weights a tensor rank has.

Imports no torch, because capacity planning asks it too.
"""

from weft.base.errors import InvalidArgumentError
from weft.llm.models.foreign import ForeignConfig
from weft.llm.models.model_config import TransformerConfig
from weft.llm.parallel.topology import ParallelSizes


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


def _is_divisible(config: TransformerConfig, size: int) -> bool:
    most = -(-config.vocab_size // size)  # tokens of a rank; the last may have fewer
    has_heads = config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0
    return has_heads and most * (size - 1) < config.vocab_size and not any(n % size for n in config.divided.values())
