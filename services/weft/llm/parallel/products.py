"""Products of which each tensor rank has a part: ``reduced``, ``gathered``, ``of_gathered``."""

import torch
from torch import Tensor

from weft.llm.ops import Linear
from weft.llm.parallel.groups import Group


def reduced(product: Linear, group: Group) -> Linear:
    """A product whose inputs are divided, ``[T, in of this rank]`` to ``[T, out]``: the sum of what the ranks have."""
    return lambda x: group.all_reduce(product(x))


def gathered(product: Linear, group: Group, num_outputs: int) -> Linear:
    """A product whose outputs are divided, ``[T, in]`` to ``[T, out]``, newly allocated.

    By default they are divided evenly; ranks behind the first ones may have fewer.
    """
    most = -(-num_outputs // group.size)

    def multiply(x: Tensor) -> Tensor:
        own = product(x)
        if missing := most - own.shape[1]:
            own = torch.nn.functional.pad(own, (0, missing))
        whole = group.all_gather(own, 1)
        return whole if whole.shape[1] == num_outputs else whole[:, :num_outputs].contiguous()

    return multiply


def of_gathered(product: Linear, group: Group) -> Linear:
    """A product that takes all inputs, of which each rank has some: ``[T, in of this rank]`` to ``[T, out]``."""
    return lambda x: product(group.all_gather(x, 1))


def embedding(token_ids: Tensor, rows: Tensor, first: int, group: Group) -> Tensor:
    """Rows of tokens, ``[N, hidden_size]``, of a table of which this rank has ``rows`` from token ``first`` on."""
    own = token_ids - first
    is_other = (own < 0) | (own >= len(rows))
    found = torch.nn.functional.embedding(own.masked_fill_(is_other, 0), rows)
    return group.all_reduce(found.masked_fill_(is_other[:, None], 0))
