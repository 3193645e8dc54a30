"""Parts of encoders: weights by name, and attention within each of several texts that lie one after another."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor
from torch.nn import functional

from weft.base.errors import InvalidArgumentError
from weft.llm.models.fields import Fields, choice, count, fault
from weft.llm.weights.checkpoint import Checkpoint, StoredTensor
from weft.llm.weights.parts import listed
from weft_kernels.linear.products import linear

Layer = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Layer] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}
#: Weights beside an encoder's own: those of other heads, and tables that follow from the configuration.
_OTHERS = re.compile(
    r"(\w+\.)?(pooler|cls|lm_head|decoder|head|classifier)\.|.*(position_ids|token_type_ids|inv_freq)$"
)
#: Queries of one product of attention to near tokens, at least.
_LEAST_QUERIES = 256


def activation(fields: Fields, name: str) -> Layer:
    """The activation that a field of ``config.json`` names. Raises InvalidArgumentError."""
    return ACTIVATIONS[choice(fields, name, ACTIVATIONS, "gelu")]


def sizes(fields: Fields) -> tuple[int, int, int, int]:
    """Width, inner width of products, heads and layers of a ``config.json``. Raises InvalidArgumentError."""
    width, inner, num_heads, num_layers = (
        count(fields, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    )
    if width % (2 * num_heads):
        raise fault("num_attention_heads", f"such that hidden_size = {width} has even heads", num_heads)
    return width, inner, num_heads, num_layers


class Weights:
    """Reads the weights of a checkpoint, each once. Methods raise InvalidArgumentError for one that does not fit.

    Args:
        prefix: Of an encoder's names where it has a head; it may be absent.
        num_bits: 8: products round to 8 bits, on a CPU.
    """

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, device: torch.device, num_bits: int = 0
    ) -> None:
        self._checkpoint, self._prefix, self._num_bits = checkpoint, prefix, num_bits
        self.dtype, self.device = dtype, device
        self._read: set[str] = set()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A weight of this shape."""
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        names = [self._prefix + name, name, self._prefix + old, old]
        found = next((one for one in names if self._checkpoint.find(one) is not None), name)
        self._checkpoint.check({found: StoredTensor(shape)}, self._checkpoint.names)
        self._read.add(found)
        return self._checkpoint.read(found).to(self.device, self.dtype)

    def linear(self, names: str | Sequence[str], num_outputs: int, num_inputs: int, *, has_bias: bool = True) -> Layer:
        """A product with a weight, or with several one after another."""
        names = (names,) if isinstance(names, str) else names
        weight = torch.cat([self.tensor(f"{name}.weight", num_outputs, num_inputs) for name in names])
        bias = torch.cat([self.tensor(f"{name}.bias", num_outputs) for name in names]) if has_bias else None
        if self.device.type != "cpu":
            return partial(functional.linear, weight=weight, bias=bias)
        return linear(weight, bias, dtype=self.dtype, num_bits=self._num_bits)

    def norm(self, name: str, width: int, eps: float, *, has_bias: bool = True) -> Layer:
        """A layer norm."""
        weight = self.tensor(f"{name}.weight", width)
        bias = self.tensor(f"{name}.bias", width) if has_bias else None
        return partial(functional.layer_norm, normalized_shape=(width,), weight=weight, bias=bias, eps=eps)

    def finish(self) -> None:
        """Raise InvalidArgumentError for weights that were not read, unless they are of other heads."""
        if left := sorted(name for name in self._checkpoint.names - self._read if not _OTHERS.match(name)):
            raise InvalidArgumentError(
                f"weights: {listed(left)} not part of the model; config.json and the weights are of different models"
            )


class Texts:
    """Token ids of texts one after another, in ascending order of length.

    Attributes:
        token_ids, type_ids: int64 ``[T]``; ``positions``: of each token in its text; ``owners``: of which text it is.
        starts: First token of each text, int64 ``[B]``; ``lengths``: tokens of each.
    """

    def __init__(self, ids: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]], device: torch.device) -> None:
        lengths = [len(one) for one in ids]
        both = torch.tensor([[*chain.from_iterable(rows)] for rows in (ids, type_ids)]).to(device)
        self.token_ids, self.type_ids = both[0], both[1]
        self.lengths = torch.tensor(lengths, device=device)
        self.starts = torch.tensor([0, *accumulate(lengths)][:-1], device=device)
        self.owners = torch.repeat_interleave(self.lengths)
        self.positions = torch.arange(len(self.token_ids), device=device) - self.starts[self.owners]
        self._shape = len(lengths), lengths[-1]
        self._places = self._is_token = None
        if lengths[0] < lengths[-1]:
            self._places = self.owners * lengths[-1] + self.positions
            mask = torch.zeros(math.prod(self._shape), dtype=torch.bool, device=device)
            self._is_token = mask.index_fill_(0, self._places, True).view(len(lengths), 1, 1, -1)
        self._near: dict[tuple[int, int], Tensor] = {}

    def attend(self, qkv: Tensor, window: int = 0) -> Tensor:
        """Attention of each token to those of its text, at most ``window`` away, or to all.

        ``qkv``: queries, keys, values ``[T, 3, heads, head_dim]``; the result is ``[T, heads * head_dim]``.
        """
        length = self._shape[1]
        if self._places is not None:
            qkv = qkv.new_zeros(math.prod(self._shape), *qkv.shape[1:]).index_copy_(0, self._places, qkv)
        q, k, v = qkv.view(*self._shape, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
        step = max(4 * window, _LEAST_QUERIES) if window else length
        parts = []
        for start in range(0, length, step):
            queries = slice(start, start + step)
            keys = slice(max(0, start - window), start + step + window) if window else slice(None)
            mask = self._mask(queries, keys, window)
            parts.append(functional.scaled_dot_product_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], mask))
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        whole = whole.transpose(1, 2).reshape(math.prod(self._shape), -1)
        return whole if self._places is None else whole[self._places]

    def _mask(self, queries: slice, keys: slice, window: int) -> Tensor | None:
        if not window or self._shape[1] <= window + 1:
            return self._is_token
        made = self._near.get((window, queries.start))
        if made is None:
            places = torch.arange(self._shape[1], device=self.starts.device)
            made = (places[queries, None] - places[keys]).abs() <= window
            made = made if self._is_token is None else made & self._is_token[..., keys]
            self._near[window, queries.start] = made
        return made

    def pool(self, hidden: Tensor, pooling: str) -> Tensor:
        """A float32 vector for each text from hidden states ``[T, width]``."""
        if pooling in ("cls", "lasttoken"):
            return hidden[self.starts if pooling == "cls" else self.starts + self.lengths - 1].float()
        zeros = torch.zeros(len(self.starts), hidden.shape[1], device=hidden.device)
        if pooling == "max":
            index = self.owners[:, None].expand_as(hidden)
            return zeros.scatter_reduce(0, index, hidden.float(), "amax", include_self=False)
        return zeros.index_add_(0, self.owners, hidden.float()) / self.lengths[:, None]
