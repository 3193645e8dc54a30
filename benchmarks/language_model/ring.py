"""Attention of a layer over a context that ranks divide: an all-gather of new keys, beside rings. A prototype.

Three ways for the step of a prompt, whose tokens ranks share, behind a context that is computed:

- *all-gather*: every rank has all keys and values; those of the step's tokens go to all ranks.
- *ring of keys*: a rank has its share of all keys and values; all shares go round, while each rank attends with its own
  queries to the share that it has, and merges the results by their log sums.
- *ring of queries*: the same, but queries go round, and partial results with their log sums come back.

All use torch's attention for CPUs, so that they differ in what is sent alone; causal masks within the step are left
out, which costs all three the same.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from weft.llm.parallel.groups import Groups

_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 16, 4, 32
_NUM_RUNS = 7
#: New tokens of a step, and keys of its context, which they are part of.
STEPS = ((256, 2000), (256, 8000), (2048, 8000))


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``q`` ``[K, G * t, D]`` over ``keys`` ``[K, n, D]``: results, and log sums ``[K, G * t, 1]``."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sums = attention(q[None], keys[None], values[None], 0.0, False)
    return out[0], log_sums[0, ..., None]


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(one[1], other[1])
    return one[0] * (one[1] - both).exp() + other[0] * (other[1] - both).exp(), both


class _Ring:
    """The ranks of a group, each of which sends to the next what it gets from the one before."""

    def __init__(self, groups: Groups) -> None:
        group = groups.context
        self.size = group.size
        self._next, self._before = (group._ranks[(group.rank + step) % group.size] for step in (1, -1))
        self.spent_s = 0.0

    def start(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Pass tensors on; the function that comes back waits for those of the rank before."""
        sent = [each.contiguous() for each in tensors]
        got = [torch.empty_like(each) for each in sent]
        works = [dist.irecv(each, self._before, tag=tag) for tag, each in enumerate(got)]
        works += [dist.isend(each, self._next, tag=tag) for tag, each in enumerate(sent)]

        def wait() -> list[Tensor]:
            start_s = time.perf_counter()
            for work in works:
                work.wait()
            self.spent_s += time.perf_counter() - start_s
            return got

        return wait


def _of_keys(ring: _Ring, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    wait, found = ring.start(keys, values), _attend(q, keys, values)
    for step in range(1, ring.size):
        keys, values = wait()
        if step + 1 < ring.size:
            wait = ring.start(keys, values)
        found = _merged(found, _attend(q, keys, values))
    return found[0]


def _of_queries(ring: _Ring, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Queries and what is known of them go round together; after a whole round they are back."""
    wait, found = ring.start(q), _attend(q, keys, values)
    for _ in range(ring.size - 1):
        (q,) = wait()
        out, log_sums = ring.start(*found)()
        found = _merged((out, log_sums), _attend(q, keys, values))
        wait = ring.start(q)
    wait()
    return ring.start(*found)()[0]


def attention_times(groups: Groups) -> dict[tuple[str, int, int], tuple[float, float, int]]:
    """Seconds of a layer's attention, of its communication, and bytes that a rank sends, by the way and the step."""
    size, found = groups.context.size, {}
    for num_new, num_keys in STEPS:
        own = (_NUM_KV_HEADS, _NUM_HEADS // _NUM_KV_HEADS * num_new // size, _HEAD_DIM)
        generator = torch.Generator().manual_seed(groups.context.rank)
        q = torch.randn(own, generator=generator)
        shares = torch.randn(2, _NUM_KV_HEADS, num_keys // size, _HEAD_DIM, generator=generator)
        whole = groups.context.all_gather(shares, 2)
        expected = _attend(q, *whole)[0]
        new = shares[:, :, : num_new // size].contiguous()

        def gathered(ring: _Ring, q: Tensor = q, whole: Tensor = whole, new: Tensor = new) -> Tensor:
            start_s = time.perf_counter()
            whole[:, :, : new.shape[2] * ring.size] = groups.context.all_gather(new, 2)
            ring.spent_s += time.perf_counter() - start_s
            return _attend(q, *whole)[0]

        def of_keys(ring: _Ring, q: Tensor = q, shares: Tensor = shares) -> Tensor:
            return _of_keys(ring, q, *shares)

        def of_queries(ring: _Ring, q: Tensor = q, shares: Tensor = shares) -> Tensor:
            return _of_queries(ring, q, *shares)

        ways: dict[str, tuple[Callable[[_Ring], Tensor], int]] = {
            "ring of keys": (of_keys, (size - 1) * shares.nbytes),
            "ring of queries": (of_queries, size * (2 * q.nbytes + q.nbytes // _HEAD_DIM)),
            "all-gather": (gathered, (size - 1) * new.nbytes),  # last, because it changes ``whole``
        }
        for name, (way, num_bytes) in ways.items():
            times = []
            for _ in range(_NUM_RUNS):
                ring = _Ring(groups)
                dist.barrier()
                start_s = time.perf_counter()
                out = way(ring)
                times.append((time.perf_counter() - start_s, ring.spent_s))
                if name != "all-gather" and (out - expected).abs().max() > 1e-4:
                    raise AssertionError(f"{name}: {(out - expected).abs().max()}")
            spent_s, communication_s = zip(*times, strict=True)
            found[name, num_new, num_keys] = statistics.median(spent_s), statistics.median(communication_s), num_bytes
    return found
