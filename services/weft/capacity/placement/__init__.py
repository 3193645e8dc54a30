"""Placement of replicas on devices, or slices of devices.

::

    problem = Problem(workloads=(Workload("minilm", 200 << 20, {"H100-80GB": 0.1}, num_replicas=3, spread=True),),
                      devices=(Device("a-0", "H100-80GB", 80 << 30, host="a", domain="zone-a", index=0), ...))
    solution = place(problem)
"""

from weft.capacity.placement.place import place
from weft.capacity.placement.problem import Device, MigProfile, Problem, Workload
from weft.capacity.placement.solution import Assignment, Bin, Solution, Unplaced

__all__ = ["Assignment", "Bin", "Device", "MigProfile", "Problem", "Solution", "Unplaced", "Workload", "place"]
