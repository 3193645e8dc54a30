"""What differs between two placements: which replicas move from where to where, come or go."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

from weft.capacity.placement.solution import Assignment, Bin, Solution


class Change(NamedTuple):
    """A replica that is somewhere else than before.

    Attributes:
        workload, replica: Which one.
        before: Where it was; None: it is new.
        after: Where it is; None: it is gone.
    """

    workload: str
    replica: int
    before: Bin | None
    after: Bin | None


def changes(previous: Solution | None, solution: Solution) -> list[Change]:
    """What a new placement changes, by workload and replica. Without one before it, every replica is new.

    Replicas of a workload are alike, so that one which is where any was has not moved.
    """
    found: list[Change] = []
    before, after = _by_workload(previous), _by_workload(solution)
    for name in sorted({*before, *after}):
        old, new = before.get(name, {}), after.get(name, {})
        stay = Counter(old.values()) & Counter(new.values())
        ways = zip_longest(_without(old, stay), _without(new, stay), fillvalue=None)
        for was, will_be in ways:
            replica = (will_be or was or (0, None))[0]
            found.append(Change(name, replica, was[1] if was else None, will_be[1] if will_be else None))
    return found


def num_moved(previous: Solution | None, solution: Solution) -> int:
    """How many replicas are neither where one of their workload was nor new."""
    if previous is None:
        return 0
    before, after = _by_workload(previous), _by_workload(solution)
    return sum(
        min(len(before[name]), len(after[name]))
        - min((Counter(before[name].values()) & Counter(after[name].values())).total(), len(after[name]))
        for name in before.keys() & after.keys()
    )


def numbered(counts: Mapping[str, Counter[Bin]], previous: Solution | None) -> tuple[Assignment, ...]:
    """Replicas with numbers from how many each device or slice holds; one that stays keeps its number if it can."""
    before = _by_workload(previous)
    assignments: list[Assignment] = []
    for name, counter in counts.items():
        left, kept = Counter(counter), dict[int, Bin]()
        for replica, bin in sorted(before.get(name, {}).items()):
            if replica < counter.total() and left[bin] > 0:
                left[bin] -= 1
                kept[replica] = bin
        free = iter(sorted(left.elements()))
        assignments += (Assignment(name, n, kept[n] if n in kept else next(free)) for n in range(counter.total()))
    return tuple(assignments)


def _by_workload(solution: Solution | None) -> dict[str, dict[int, Bin]]:
    found: dict[str, dict[int, Bin]] = defaultdict(dict)
    for name, replica, bin in solution.assignments if solution else ():
        found[name][replica] = bin
    return found


def _without(replicas: Mapping[int, Bin], stay: Counter[Bin]) -> list[tuple[int, Bin]]:
    """The replicas but for those that stay."""
    left, rest = Counter(stay), []
    for replica, bin in sorted(replicas.items()):
        if left[bin] > 0:
            left[bin] -= 1
        else:
            rest.append((replica, bin))
    return rest
