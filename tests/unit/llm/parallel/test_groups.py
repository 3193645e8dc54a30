"""Ranks exchange tensors along the axis of a group."""

import torch
from tests.ranks import on_ranks

from weft.llm.parallel.groups import Groups
from weft.llm.parallel.topology import ParallelSizes, Place

SIZES = ParallelSizes(tensor=2, pipeline=2)


def test_a_place_has_one_number() -> None:
    """The ranks of all places are 0 to their number less one."""
    sizes = ParallelSizes(2, 3, 4)
    places = [Place.of(rank, sizes) for rank in range(sizes.num_ranks)]
    assert list(range(24)) == [place.rank(sizes) for place in places]
    assert Place(tensor=1) == places[1]


def exchange(groups: Groups) -> tuple[list[int], float, float]:
    """What every operation gives, of a rank's number."""
    own = torch.tensor([groups.pipeline.rank * 2.0 + groups.tensor.rank])
    if groups.pipeline.rank == 0:
        groups.pipeline.send(own, 1)
        got = own
    else:
        got = groups.pipeline.receive(torch.empty(1), 0)
    return groups.tensor.all_gather(own).tolist(), groups.tensor.all_reduce(own).item(), got.item()


def test_tensors_go_along_one_axis() -> None:
    """Gathered and added are those of the group's ranks alone, and a stage sends to the next."""
    assert [([0, 1], 1, 0), ([0, 1], 1, 1), ([2, 3], 5, 0), ([2, 3], 5, 1)] == on_ranks(SIZES, exchange)


def num_kept(groups: Groups) -> int:
    """Messages that a rank still keeps after many sends."""
    for index in range(50):
        if groups.pipeline.rank == 0:
            groups.pipeline.send(torch.full((1,), float(index)), 1)
        else:
            assert groups.pipeline.receive(torch.empty(1), 0).item() == index
    return len(groups.pipeline._sending)


def test_what_is_sent_is_freed() -> None:
    """A stage keeps the last messages alone."""
    assert [5, 0] == on_ranks(ParallelSizes(pipeline=2), num_kept)


def large_sum(groups: Groups) -> tuple[bool, list[int]]:
    """Whether a sum of many rows, which ranks divide, is bitwise that of the same rows at once, and its shape."""
    numbers = [torch.randn(701, 512, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    found = groups.tensor.all_reduce(numbers[groups.tensor.rank])
    return torch.equal(numbers[0] + numbers[1] + numbers[2], found), list(found.shape)


def test_sums_of_many_rows() -> None:
    """They are added in the order of ranks too, each rank some rows, which need not be as many."""
    assert [(True, [701, 512])] * 3 == on_ranks(ParallelSizes(tensor=3), large_sum)
