"""What a step of a replica takes, as a line through its tokens: from device figures, or as somebody published it."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.capacity.devices import find_device


class Shape(NamedTuple):
    """A model: sizes that costs follow from; weights are bfloat16.

    Attributes:
        num_weights: That multiply each token, the LM head included.
        kv_heads, head_dim: Of keys and values; ``heads`` of queries.
    """

    num_weights: float
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of a token, 16 bits each."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * 2


#: Llama 3 8B and 70B, and OPT-13B, from their config.json.
SHAPES = {
    "8b": Shape(7.5e9, 32, 32, 8),
    "70b": Shape(69.5e9, 80, 64, 8),
    "opt-13b": Shape(12.7e9, 40, 40, 40),
}


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: ``fixed + max(weights, token * T) + kv * C + attend * T * context``.

    Attributes:
        fixed_s: Of every step: launches, and the latency of exchanges between ranks.
        weights_s: Reading the weights; computing fewer tokens hides in it.
        token_s: Products of a token, and what its ranks exchange for it.
        kv_s: Reading keys and values of a token of context, by one decoded token.
        attend_s: Attention of a token of a prompt to one before it.
        num_kv_tokens: That fit into the memory of the replica.
        kv_token_bytes: Of the whole model, for transfers.
    """

    fixed_s: float
    weights_s: float
    token_s: float
    kv_s: float
    attend_s: float
    num_kv_tokens: int
    kv_token_bytes: int = 131_072

    def step_s(self, num_tokens: int, num_decoded_context: float, attended: float = 0.0) -> float:
        """Seconds of a step.

        Args:
            num_tokens: That the step computes.
            num_decoded_context: Context of all sequences that decode.
            attended: Pairs of a token of a prompt and one before it.
        """
        products_s = max(self.weights_s, self.token_s * num_tokens)
        return self.fixed_s + products_s + self.kv_s * num_decoded_context + self.attend_s * attended

    def prompt_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Seconds of a prompt alone, in one step."""
        new = num_tokens - num_cached
        return self.step_s(new, 0, new * (num_cached + new / 2))


def costs_of(
    shape: Shape,
    device: str,
    num_devices: int = 1,
    *,
    compute_share: float = 0.0,
    exchange_s: float = 0.0,
    exchange_token_s: float = 0.0,
) -> StepCosts:
    """Costs on devices of ``weft plan``'s table, whose ranks divide the model evenly.

    Args:
        compute_share: Of the peak that products reach; 0: the table's.
        exchange_s, exchange_token_s: Between the ranks, in a step and for each of its tokens.
    """
    spec = find_device(device)
    if compute_share:
        spec = replace(spec, compute_share=compute_share)
    flops = spec.peak("bf16") * spec.compute_share * num_devices
    moved = spec.bytes_per_s * spec.bandwidth_share * num_devices
    room = spec.memory_bytes * num_devices * 0.9 - 2 * shape.num_weights - spec.runtime_bytes * num_devices
    return StepCosts(
        fixed_s=shape.num_layers * 9 * 1.3e-6 + exchange_s,
        weights_s=2 * shape.num_weights / moved,
        token_s=2 * shape.num_weights / flops + exchange_token_s,
        kv_s=shape.kv_token_bytes / moved,
        attend_s=4 * shape.num_layers * shape.heads * shape.head_dim / flops,
        num_kv_tokens=max(int(room / shape.kv_token_bytes), 1),
        kv_token_bytes=shape.kv_token_bytes,
    )
