"""Products of which each tensor rank has a part: ``Reduced``, ``Gathered``, ``OfGathered``."""

from collections.abc import Callable

import torch
from torch import Tensor

from weft.llm.parallel.groups import Group

_Product = Callable[[Tensor], Tensor]


class Reduced:
    """A product whose inputs are divided: the sum of what the ranks have."""

    def __init__(self, product: _Product, group: Group) -> None:
        self._product = product
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in of this rank]`` to ``[T, out]``, newly allocated."""
        return self._group.all_reduce(self._product(x))


class Gathered:
    """A product whose outputs are divided, by default evenly; ranks behind the first ones may have fewer."""

    def __init__(self, product: _Product, group: Group, num_outputs: int) -> None:
        self._product = product
        self._group = group
        self._num_outputs = num_outputs
        self._most = -(-num_outputs // group.size)

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in]`` to ``[T, out]``, newly allocated."""
        own = self._product(x)
        if missing := self._most - own.shape[1]:
            own = torch.nn.functional.pad(own, (0, missing))
        whole = self._group.all_gather(own, 1)
        return whole if whole.shape[1] == self._num_outputs else whole[:, : self._num_outputs].contiguous()


class OfGathered:
    """A product that takes all inputs, of which each rank has some."""

    def __init__(self, product: _Product, group: Group) -> None:
        self._product = product
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, in of this rank]`` to ``[T, out]``, newly allocated."""
        return self._product(self._group.all_gather(x, 1))


def embedding(token_ids: Tensor, rows: Tensor, first: int, group: Group) -> Tensor:
    """Rows of tokens, ``[N, hidden_size]``, of a table of which this rank has ``rows`` from token ``first`` on."""
    own = token_ids - first
    is_other = (own < 0) | (own >= len(rows))
    found = torch.nn.functional.embedding(own.masked_fill_(is_other, 0), rows)
    return group.all_reduce(found.masked_fill_(is_other[:, None], 0))
