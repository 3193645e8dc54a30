"""Which row each vertex of a layered drawing stands in, and where in the row.

Source:
    K. Sugiyama, S. Tagawa, M. Toda, "Methods for visual understanding of hierarchical system structures", 1981.
"""

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise

_NUM_SWEEPS = 12

Row = list[int]
#: Vertex -> its neighbours in the row above, or below.
Neighbours = Mapping[int, Sequence[int]]


def longest_path_ranks(edges: Sequence[tuple[int, int]], lowest: Sequence[int]) -> list[int]:
    """Rank of each vertex: above its lowest one allowed as far only as the longest path to it demands.

    Args:
        edges: (from, to), without a cycle.
        lowest: For each vertex.
    """
    ranks = list(lowest)
    above: dict[int, list[int]] = {vertex: [] for vertex in range(len(ranks))}
    for source, target in edges:
        above[target].append(source)
    for vertex in TopologicalSorter(above).static_order():
        ranks[vertex] = max([ranks[vertex], *(ranks[source] + 1 for source in above[vertex])])
    return ranks


def ordered(rows: Sequence[Row], above: Neighbours, below: Neighbours) -> list[Row]:
    """Each row in the order found with the fewest crossings; ties keep the order given.

    Sweeps of barycentres, after each of which neighbours change places where that saves a crossing.
    """
    best = [list(row) for row in rows]
    fewest = _num_crossings(best, below)
    for start in (rows, [row[::-1] for row in rows]):
        found, crossings = _swept(start, above, below)
        if crossings < fewest:
            best, fewest = found, crossings
    return best


def _swept(rows: Sequence[Row], above: Neighbours, below: Neighbours) -> tuple[list[Row], int]:
    """The best order met while sweeping down and up, and its crossings."""
    current = [list(row) for row in rows]
    best, fewest = [list(row) for row in rows], _num_crossings(rows, below)
    for sweep in range(_NUM_SWEEPS):
        if not fewest:
            break
        is_downward = sweep % 2 == 0
        fixed = above if is_downward else below
        for i in range(1, len(current)) if is_downward else range(len(current) - 2, -1, -1):
            place = {vertex: at for at, vertex in enumerate(current[i - 1 if is_downward else i + 1])}
            current[i] = _by_barycentre(current[i], fixed, place)
        _transpose(current, above, below)
        crossings = _num_crossings(current, below)
        if crossings < fewest:
            best, fewest = [list(row) for row in current], crossings
    return best, fewest


def _by_barycentre(row: Row, neighbours: Neighbours, place: Mapping[int, int]) -> Row:
    keys = {}
    for at, vertex in enumerate(row):
        places = [place[neighbour] for neighbour in neighbours[vertex]]
        keys[vertex] = sum(places) / len(places) if places else float(at)
    return sorted(row, key=lambda vertex: keys[vertex])


def _transpose(rows: Sequence[Row], above: Neighbours, below: Neighbours) -> None:
    """Neighbours in a row change places where their edges then cross less."""
    for i, row in enumerate(rows):
        sides = [
            (neighbours, {vertex: at for at, vertex in enumerate(rows[i + step])})
            for step, neighbours in ((-1, above), (1, below))
            if 0 <= i + step < len(rows)
        ]
        for left in range(len(row) - 1):
            u, v = row[left], row[left + 1]
            saved = 0
            for neighbours, place in sides:
                saved += _num_inverted(neighbours[u], neighbours[v], place)
                saved -= _num_inverted(neighbours[v], neighbours[u], place)
            if saved > 0:
                row[left], row[left + 1] = v, u


def _num_inverted(left: Sequence[int], right: Sequence[int], place: Mapping[int, int]) -> int:
    """Crossings of the edges to ``left`` from one vertex with those to ``right`` from the next."""
    return sum(place[a] > place[b] for a in left for b in right)


def _num_crossings(rows: Sequence[Row], below: Neighbours) -> int:
    total = 0
    for upper, lower in pairwise(rows):
        place = {vertex: at for at, vertex in enumerate(lower)}
        seen: list[int] = []
        for vertex in upper:
            ends = sorted(place[neighbour] for neighbour in below[vertex])
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def spread(wanted: Sequence[float], weights: Sequence[float], distances: Sequence[float]) -> list[float]:
    """Places nearest to ``wanted`` (weighted least squares), with ``distances[i]`` or more from place i to i+1."""
    offsets = [0.0]
    for distance in distances:
        offsets.append(offsets[-1] + distance)
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, how many): pooled where the order would be broken
    for place, weight, offset in zip(wanted, weights, offsets, strict=False):
        mean, total, count = place - offset, weight, 1
        while blocks and blocks[-1][0] >= mean:
            other, mass, size = blocks.pop()
            mean, total, count = (other * mass + mean * total) / (mass + total), mass + total, size + count
        blocks.append((mean, total, count))
    means = [mean for mean, _, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]
