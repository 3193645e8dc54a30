"""Which device, or slice of one, holds which replica.

::

    problem = Problem(workloads=(Workload("minilm", 200 << 20, {"H100-80GB": 0.1}, num_replicas=3, spread=True),),
                      devices=(Device("a-0", "H100-80GB", 80 << 30, host="a", domain="zone-a", index=0), ...))
    solution = place(problem)
"""

from dataclasses import replace

from weft_capacity.placement.exact import improved
from weft_capacity.placement.first_fit import first_fit
from weft_capacity.placement.problem import Device, MigProfile, Problem, Workload
from weft_capacity.placement.reasons import with_reasons
from weft_capacity.placement.solution import Assignment, Bin, Solution, Unplaced

__all__ = ["Assignment", "Bin", "Device", "MigProfile", "Problem", "Solution", "Unplaced", "Workload", "place"]

#: How long the exact solver may search, in its own deterministic seconds.
TIME_LIMIT_S = 5.0


def place(
    problem: Problem, previous: Solution | None = None, *, time_limit_s: float = TIME_LIMIT_S, is_exact: bool = True
) -> Solution:
    """Place every replica; the least cost first, then the fewest moves, then the most even load.

    Args:
        problem: Workloads and devices.
        previous: Where replicas are now, of the same or of another problem.
        time_limit_s: How long the exact solver may search; the same on every machine, whatever its speed.
        is_exact: Whether it is asked at all; without it, or OR-tools (extra ``plan``), first-fit decreasing decides.

    Returns:
        A placement that breaks no rule of the problem. Replicas without a place are in ``unplaced``, with the cause.
    """
    solution = first_fit(problem, previous)
    if is_exact and problem.workloads:
        try:
            solution = improved(problem, solution, previous, time_limit_s)
        except ImportError:
            note = "OR-tools is not installed, so first-fit decreasing decided; better: pip install 'weft[plan]'"
            solution = replace(solution, notes=(*solution.notes, note))
    return with_reasons(problem, solution)
