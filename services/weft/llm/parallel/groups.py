"""Ranks that exchange tensors along one axis, over gloo on CPUs and NCCL on GPUs: ``Group``, ``Groups``.

And products of which each tensor rank has a part: ``reduced``, ``gathered``, ``of_gathered``.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.llm.ops import Linear
from weft.llm.parallel.topology import ParallelSizes, Place

#: Sums of more are divided among more than two ranks.
_LARGE_BYTES = 1 << 20


class Group:
    """The ranks of a model that differ along one axis alone. All of them call the same operations in the same order.

    An operation blocks until the others have called it, on a GPU only its stream. It raises RuntimeError if one of them
    is lost. A group of one rank does nothing.

    Attributes:
        rank: Index of this process in the group.
        size: Its number of ranks.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: tuple[int, ...] = (0,),
        handle: "dist.ProcessGroup | None" = None,
        back: "dist.ProcessGroup | None" = None,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self._ranks = ranks
        self._handle = handle
        self._back = back  # for what goes to a lower rank: on a GPU it must not wait for what goes to a higher one
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """``x`` of every rank, of equal shapes, side by side along ``dim`` in the order of ranks."""
        return x if self.size == 1 else torch.cat(self._parts(x), dim)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of ``x`` over the ranks, added in their order, so that an element's sum does not depend on its place.

        Of many rows each rank adds some, and the sums are gathered: of n ranks' numbers each receives 2 (n - 1) / n
        then, and not n - 1.
        """
        if self.size == 1:
            return x
        if self.size == 2 or x.nbytes < _LARGE_BYTES:
            return _ordered_sum(self._parts(x))
        slices = x.contiguous().tensor_split(self.size)
        own = _ordered_sum(self._exchange(slices, [torch.empty_like(slices[self.rank]) for _ in slices]))
        return torch.cat(self._exchange([own] * self.size, [torch.empty_like(each) for each in slices]))

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """``x`` of every rank; its own may share its memory."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        if x.is_cuda:
            dist.all_gather(parts, x, group=self._handle)
            return parts
        return self._exchange([x] * self.size, parts)

    def _exchange(self, sent: Sequence[torch.Tensor], received: list[torch.Tensor]) -> list[torch.Tensor]:
        """``received``, filled with what each rank sends to this one; ``sent``: what this one sends to each.

        On a CPU ranks exchange messages: 145 us at best for 2 KB between two processes of one machine, where a
        collective of gloo, which hands it to another thread, takes 270.
        """
        if sent[0].is_cuda:
            dist.all_to_all(received, list(sent), group=self._handle)
            return received
        received[self.rank] = sent[self.rank]
        others = [(index, rank) for index, rank in enumerate(self._ranks) if index != self.rank]
        works = [dist.irecv(received[index], rank, group=self._handle) for index, rank in others]
        works += [dist.isend(sent[index], rank, group=self._handle) for index, rank in others]
        for work in works:
            if work is not None:
                work.wait()
        return received

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of the first rank, in place of this rank's, which has an equal shape and type."""
        if self.size > 1:
            dist.broadcast(x, self._ranks[0], group=self._handle)
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Start to send ``x`` to the rank ``to`` of the group, which calls ``receive`` with an equal shape and type.

        Waits only for what was sent long before; ``x`` must not be changed any more.
        """
        # gloo completes a message when it is awaited, not before. The others have begun to take one that is two steps
        # old, of at most as many parts as there are stages, before this rank gets here.
        while self._sending and (len(self._sending) > 2 * self.size or self._sending[0][0].is_completed()):
            self._sending.popleft()[0].wait()
        x, handle = x.contiguous(), self._handle if to > self.rank else self._back
        self._sending.append((dist.isend(x, self._ranks[to], group=handle), x))

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Fill ``x`` with what the rank ``source`` of the group sends."""
        self.start_receive(x, source).wait()
        return x

    def start_receive(self, x: torch.Tensor, source: int) -> Any:
        """As ``receive``, but ``x`` is filled once ``wait`` of the result returns."""
        return dist.irecv(x, self._ranks[source], group=self._handle if source < self.rank else self._back)


def _ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0] + parts[1]
    for each in parts[2:]:
        total.add_(each)
    return total


class Groups(NamedTuple):
    """The groups that a rank is in, by axis; by default it is alone."""

    tensor: Group = Group()
    pipeline: Group = Group()
    context: Group = Group()


ALONE = Groups()


def join(rank: int, sizes: ParallelSizes, store: dist.Store, *, device: str, timeout_s: float) -> Groups:
    """Meet the other ranks of the model at ``store``, and return the groups of ``rank``; once in a process.

    Raises RuntimeError if they do not come within ``timeout_s``. It does not limit operations: ranks may load at
    different speeds, and the service ends a step that takes too long.
    """
    backend = "nccl" if device.startswith("cuda") else "gloo"
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=sizes.num_ranks, timeout=limit)
    own = Place.of(rank, sizes)
    found: dict[str, Group] = {}
    axes = {"tensor": sizes.tensor, "stage": sizes.pipeline, "context": sizes.context}
    for axis, size in axes.items():
        others = {name: range(number) for name, number in axes.items() if name != axis}
        for place in product(*others.values()):  # every rank creates all groups, in one order
            at = dict(zip(others, place, strict=True))
            ranks = tuple(Place(**at, **{axis: index}).rank(sizes) for index in range(size))
            if size > 1:
                handles = [dist.new_group(list(ranks)) for _ in range(1 + (axis == "stage"))]
                if rank in ranks:
                    found[axis] = Group(getattr(own, axis), ranks, *handles)
    return Groups(*(found.get(axis, Group()) for axis in axes))


def reduced(product: Linear, group: Group) -> Linear:
    """A product whose inputs are divided, ``[T, in of this rank]`` to ``[T, out]``: the sum of what the ranks have."""
    return lambda x: group.all_reduce(product(x))


def gathered(product: Linear, group: Group, num_outputs: int) -> Linear:
    """A product whose outputs are divided, ``[T, in]`` to ``[T, out]``, newly allocated.

    By default they are divided evenly; ranks behind the first ones may have fewer.
    """
    most = -(-num_outputs // group.size)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        own = product(x)
        if missing := most - own.shape[1]:
            own = torch.nn.functional.pad(own, (0, missing))
        whole = group.all_gather(own, 1)
        return whole if whole.shape[1] == num_outputs else whole[:, :num_outputs].contiguous()

    return multiply


def of_gathered(product: Linear, group: Group) -> Linear:
    """A product that takes all inputs, of which each rank has some: ``[T, in of this rank]`` to ``[T, out]``."""
    return lambda x: product(group.all_gather(x, 1))


def embedding(token_ids: torch.Tensor, rows: torch.Tensor, first: int, group: Group) -> torch.Tensor:
    """Rows of tokens, ``[N, hidden_size]``, of a table of which this rank has ``rows`` from token ``first`` on."""
    own = token_ids - first
    is_other = (own < 0) | (own >= len(rows))
    found = torch.nn.functional.embedding(own.masked_fill_(is_other, 0), rows)
    return group.all_reduce(found.masked_fill_(is_other[:, None], 0))
