"""Placements hold every rule, cost the least, and move as little as can be."""

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from tests.unit.capacity.placement.problems import GIB, H100, by_brute_force, gpus, num_unplaced, problems

from weft.base.errors import UnsupportedError
from weft.capacity.placement import Bin, Device, Problem, Workload, place
from weft.capacity.placement.place import changes
from weft.capacity.placement.problem import known_mig
from weft.capacity.placement.solution import cost_per_hour, faults, use_of
from weft.capacity.placement.solver import first_fit

pytest.importorskip("ortools")


@settings(max_examples=60, deadline=None)
@given(problems(max_workloads=4, max_devices=4))
def test_every_rule_is_kept(problem: Problem) -> None:
    """Memory, load, sharing, class, spread, hosts apart and MIG's geometry hold; what has no place has a cause."""
    solution = place(problem, time_limit_s=0.3)
    assert [] == faults(problem, solution)
    assert all(entry.why for entry in solution.unplaced)


@settings(max_examples=25, deadline=None)
@given(problems(max_workloads=2, max_devices=3, max_replicas=2))
def test_tiny_problems_are_placed_as_by_brute_force(problem: Problem) -> None:
    """Where every placement can be tried, the solver finds one exactly if there is one, and none costs less."""
    assume(problem.num_replicas <= 3)
    if any(device.mig for device in problem.devices):
        assume(problem.num_replicas <= 2)
    best, solution = by_brute_force(problem), place(problem)
    if best is None:
        assert num_unplaced(solution) > 0
    else:
        assert (0, best[0], best[1]) == (
            num_unplaced(solution),
            cost_per_hour(problem, solution),
            len(solution.devices),
        )


@settings(max_examples=20, deadline=None)
@given(problems(max_workloads=4, max_devices=4))
def test_a_placement_that_still_holds_moves_nothing(problem: Problem) -> None:
    """Placed again with what was there before, no replica of an unchanged problem is elsewhere at the same cost."""
    before = place(problem, time_limit_s=0.3)
    after = place(problem, before, time_limit_s=0.3)
    assert cost_per_hour(problem, after) <= cost_per_hour(problem, before) or num_unplaced(before)
    if cost_per_hour(problem, after) == cost_per_hour(problem, before) and before.is_optimal:
        assert not any(change.before and change.after for change in changes(before, after))


def test_the_same_question_has_the_same_answer() -> None:
    """Two searches of the solver, cut short, agree in every assignment."""
    workloads = tuple(Workload(f"m{i}", (5 + 7 * i) * GIB, {"*": 0.1 + 0.07 * i}, 3, spread=True) for i in range(5))
    problem = Problem(workloads, gpus(10))
    assert place(problem, time_limit_s=0.2) == place(problem, time_limit_s=0.2)


def test_the_solver_finds_what_no_simple_rule_does() -> None:
    """Eleven models fill three devices to the last byte; by decreasing size they need a fourth."""
    sizes = [5, 8, 9, 9, 10, 11, 12, 23, 41, 51, 61]
    problem = Problem(tuple(Workload(f"m{i}", size * GIB, {"*": 0.0}) for i, size in enumerate(sizes)), gpus(4))
    assert 4 == len({bin.device for _, bin in first_fit(problem, problem.devices, None)})
    assert 3 == len(place(problem).devices)


def test_hundreds_of_devices_are_placed_within_the_limit() -> None:
    """What cannot be proved in the time is said, and every replica has a place all the same."""
    workloads = tuple(Workload(f"m{i}", (3 + i) * GIB, {"*": 0.1 + 0.01 * i}, 8, spread=i % 3 == 0) for i in range(25))
    solution = place(Problem(workloads, gpus(300), 0.7), time_limit_s=0.5)
    assert not solution.unplaced
    assert any("cost" in note for note in solution.notes)


def test_without_or_tools_the_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'weft-mesh\[plan\]'"):
        place(Problem((Workload("m", GIB, {"*": 0.1}),), gpus(1)))


def test_too_large_a_problem_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit of variables the solver is not asked, and a note says so."""
    monkeypatch.setattr("weft.capacity.placement.solver.MAX_VARIABLES", 1)
    problem = Problem((Workload("m", GIB, {"*": 0.1}, 2), Workload("n", GIB, {"*": 0.1})), gpus(2))
    solution = place(problem)
    assert "too large for the solver" in solution.notes[0]
    assert 3 == len(solution.assignments)


def test_replicas_are_spread_over_zones() -> None:
    """Five replicas in three zones: two, two and one."""
    problem = Problem((Workload("m", GIB, {"*": 0.01}, 5, spread=True),), gpus(6))
    solution = place(problem)
    zones = [bin.device for _, _, bin in solution.assignments]
    assert [1, 2, 2] == sorted(
        sum(zone in group for zone in zones) for group in (("d0", "d1"), ("d2", "d3"), ("d4", "d5"))
    )


def test_models_that_share_no_gpu_get_slices_of_it() -> None:
    """Seven models, each alone on what it runs on, share one GPU as seven slices, not seven GPUs."""
    workloads = tuple(Workload(f"m{i}", 9 * GIB, {H100: 0.1}) for i in range(7))
    problem = Problem(workloads, gpus(7, with_mig=True, max_models=1))
    solution = place(problem)
    assert ["d0"] == solution.devices
    assert ["1g.10gb"] * 7 == [bin.profile for bin in solution.slices("d0")]


def test_a_mixture_of_slices_is_found() -> None:
    """A model of 38 GiB and four of 9 GiB fill one GPU: 3g beside four 1g, which no other order of slices holds."""
    large = Workload("large", 38 * GIB, {H100: 0.4})
    small = Workload("small", 9 * GIB, {H100: 0.1}, 4)
    solution = place(Problem((large, small), gpus(2, with_mig=True, max_models=1)))
    assert ["d0"] == solution.devices
    assert ["1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "3g.40gb"] == sorted(b.profile for b in solution.slices("d0"))


def test_the_cheaper_class_is_taken() -> None:
    """A model that fits a cheap device and a dear one is on the cheap one, in either order of devices."""
    cheap = Device("cheap", "A30-24GB", 24 * GIB, cost_per_hour=0.5)
    dear = Device("dear", H100, 80 * GIB, cost_per_hour=3.0)
    for devices in ((cheap, dear), (dear, cheap)):
        solution = place(Problem((Workload("m", 10 * GIB, {"A30-24GB": 0.9, H100: 0.1}),), devices))
        assert ["cheap"] == solution.devices


def test_one_large_device_beats_two_small_ones_where_it_costs_less() -> None:
    """Cost decides, not the price of the device that is opened first."""
    devices = (
        *(Device(f"s{i}", "A30-24GB", 24 * GIB, cost_per_hour=1.0) for i in range(4)),
        *gpus(1, cost_per_hour=2.5),
    )
    problem = Problem((Workload("m", 20 * GIB, {"*": 0.2}, 4),), devices)
    assert ["d0"] == place(problem).devices


def test_moves_are_few_where_the_cost_is_the_same() -> None:
    """A device more and a replica more: what is placed stays, though other placements cost as much."""
    small = Workload("small", 30 * GIB, {"*": 0.3}, 2)
    large = Workload("large", 50 * GIB, {"*": 0.5}, 2)
    before = place(Problem((small, large), gpus(2)))
    after = place(Problem((replace(small, num_replicas=3), large), gpus(4)), before)
    assert [("small", None)] == [(change.workload, change.before) for change in changes(before, after)]


def test_load_is_evened_out() -> None:
    """At one cost the highest load is as low as it can be: spread models bring both devices to 0.5."""
    one = Workload("one", GIB, {"*": 0.4}, 2, spread=True)
    two = Workload("two", GIB, {"*": 0.1}, 2)
    problem = Problem((one, two), gpus(2, per_host=1))
    solution = place(problem)
    assert [0.5, 0.5] == [pytest.approx(use.load) for use in use_of(problem, solution).values()]


def test_an_exact_fit_of_thirds_is_a_fit() -> None:
    """Three loads of a third fill a device: rounding takes nothing away."""
    problem = Problem((Workload("m", GIB, {"*": 1 / 3}, 3),), gpus(3))
    assert 1 == len(place(problem).devices)


def test_nothing_to_place_is_placed() -> None:
    """No workload, or none with a replica, costs nothing."""
    assert () == place(Problem((), gpus(1))).assignments
    assert () == place(Problem((Workload("m", GIB, {"*": 0.1}, 0),), gpus(1))).assignments


@pytest.mark.parametrize("device_class", known_mig())
def test_slices_are_within_the_gpu(device_class: str) -> None:
    """Every slice ends within the memory slices of its GPU, and larger slices have no less of anything."""
    profiles = known_mig()[device_class]
    total = max(profile.num_slices for profile in profiles)
    for profile in profiles:
        assert all(start + profile.num_slices <= total for start in profile.starts)
    for smaller, larger in pairwise(profiles):
        assert (smaller.memory_bytes, smaller.compute_share) <= (larger.memory_bytes, larger.compute_share)


@pytest.mark.parametrize(
    ("slices", "is_legal"),
    [
        ([("4g.40gb", 0), ("3g.40gb", 4)], True),
        ([("3g.40gb", 0), ("3g.40gb", 4)], True),
        ([("1g.10gb", start) for start in range(7)], True),
        ([("2g.20gb", 0), ("2g.20gb", 2), ("3g.40gb", 4)], True),
        ([("1g.20gb", 0), ("1g.20gb", 2), ("1g.20gb", 4), ("1g.20gb", 6)], True),
        ([("4g.40gb", 0), ("4g.40gb", 4)], False),
        ([("3g.40gb", 2)], False),
        ([("1g.10gb", 7)], False),
        ([("2g.20gb", 6)], False),
        ([("3g.40gb", 0), ("1g.10gb", 3)], False),
        ([("7g.80gb", 0), ("1g.10gb", 0)], False),
    ],
)
def test_partitions_are_those_of_nvidia(slices: list[tuple[str, int]], is_legal: bool) -> None:
    """Partitions of NVIDIA's tables are legal, and those that they leave out are not."""
    workloads = tuple(Workload(f"m{i}", 0, {"*": 0.0}) for i in range(len(slices)))
    problem = Problem(workloads, gpus(1, with_mig=True))
    solution = place(problem)
    bins = [Bin("d0", *entry) for entry in slices]
    placed = tuple(entry._replace(bin=bin) for entry, bin in zip(solution.assignments, bins, strict=True))
    assert is_legal == (not faults(problem, replace(solution, assignments=placed)))
