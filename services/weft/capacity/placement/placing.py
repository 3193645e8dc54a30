"""Placing: first-fit decreasing, and from there the exact solver."""

from dataclasses import replace

from weft.capacity.placement.exact import improved
from weft.capacity.placement.first_fit import first_fit
from weft.capacity.placement.problem import Problem
from weft.capacity.placement.reasons import with_reasons
from weft.capacity.placement.solution import Solution

#: How long the exact solver may search, in its own deterministic seconds.
TIME_LIMIT_S = 5.0


def place(
    problem: Problem,
    previous: Solution | None = None,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    is_exact: bool = True,
    keeps: bool = False,
) -> Solution:
    """Place every replica; the least cost first, then the fewest moves, then the most even load.

    Args:
        problem: Workloads and devices.
        previous: Where replicas are now, of the same or of another problem.
        time_limit_s: How long the exact solver may search; the same on every machine, whatever its speed.
        is_exact: Whether it is asked at all; without it, or OR-tools (extra ``plan``), first-fit decreasing decides.
        keeps: Fewest moves first, then the least cost.

    Returns:
        A placement that breaks no rule of the problem. Replicas without a place are in ``unplaced``, with the cause.
    """
    solution = first_fit(problem, previous, keeps=keeps)
    if is_exact and problem.workloads:
        try:
            solution = improved(problem, solution, previous, time_limit_s, keeps=keeps)
        except ImportError:
            note = "OR-tools is not installed, so first-fit decreasing decided; better: pip install 'weft-mesh[plan]'"
            solution = replace(solution, notes=(*solution.notes, note))
    return with_reasons(problem, solution)
