"""Placements hold every rule, cost the least, and move as little as can be."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from tests.unit.capacity.placement.problems import GIB, H100, by_brute_force, gpus, num_unplaced, problems

from weft.capacity.placement import Assignment, Bin, Device, Problem, Solution, Workload, place
from weft.capacity.placement.place import changes, check_change
from weft.capacity.placement.problem import known_mig, mig_profiles, read_fleet
from weft.capacity.placement.solution import cost_per_hour, faults, numbered
from weft.capacity.placement.solver import first_fit

pytest.importorskip("ortools")

GPU = Device("", H100, 80 * GIB, index=0, max_models=4, cost_per_hour=2.5)
MODEL = Workload("m", GIB, {"*": 0.1})
PLACED = place(
    Problem((Workload("small", 20 * GIB, {"*": 0.2}, 2), Workload("large", 50 * GIB, {"*": 0.5}, 2)), gpus(4))
)


@settings(max_examples=60, deadline=None)
@given(problems(max_workloads=4, max_devices=4))
def test_every_rule_is_kept(problem: Problem) -> None:
    """Memory, load, sharing, class, spread and MIG's geometry hold; what has no place has a cause."""
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


def test_too_large_a_problem_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit of variables the solver is not asked, and a note says so."""
    monkeypatch.setattr("weft.capacity.placement.solver.MAX_VARIABLES", 1)
    problem = Problem((Workload("m", GIB, {"*": 0.1}, 2), Workload("n", GIB, {"*": 0.1})), gpus(2))
    solution = place(problem)
    assert "too large for the solver" in solution.notes[0]
    assert 3 == len(solution.assignments)


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


@settings(max_examples=12, deadline=None)
@given(problems(max_workloads=3, max_devices=4), problems(max_workloads=3, max_devices=4))
def test_any_change_is_told_in_full(before: Problem, after: Problem) -> None:
    """Between any two problems: what stays, moves, starts and stops adds up to both placements."""
    placed = place(before, time_limit_s=0.1)
    checked = check_change(before, placed, after)
    assert [] == faults(after, checked.solution)
    told = [change for change, _ in checked.changes]
    assert len(placed.assignments) - len(checked.solution.assignments) == sum(
        (change.after is None) - (change.before is None) for change in told
    )
    assert all(why for _, why in checked.moves)
    assert num_unplaced(checked.solution) or checked.text()


def test_alike_replicas_that_change_places_have_not_moved() -> None:
    """Two replicas of a model on each other's device are where they were."""
    first, second = PLACED.assignments[:2]
    swapped = replace(PLACED, assignments=(first._replace(bin=second.bin), second._replace(bin=first.bin)))
    kept = replace(PLACED, assignments=(first, second))
    assert [] == changes(kept, swapped)


def test_numbers_stay_with_what_stays() -> None:
    """A replica that stays keeps its number when others are added."""
    counts: dict[str, Counter[Bin]] = {"small": Counter(), "large": Counter()}
    for name, _, bin in PLACED.assignments:
        counts[name][bin] += 1
    counts["small"][PLACED.assignments[0].bin] += 1
    after = {entry[:2]: entry.bin for entry in numbered(counts, PLACED)}
    assert all(after[entry[:2]] == entry.bin for entry in PLACED.assignments)


def test_every_broken_rule_is_named() -> None:
    """Each fault of a placement is found: memory, load, sharing, class, spread, slices, counting."""
    problem = Problem(
        (
            Workload("a", 50 * GIB, {H100: 0.6}, 2, spread=True),
            Workload("b", GIB, {"cpu": 0.1}),
            Workload("c", GIB, {"*": 0.1}),
        ),
        gpus(4, with_mig=True, max_models=1),
    )

    def found(*placed: tuple[str, int, Bin]) -> str:
        return "; ".join(faults(problem, Solution(tuple(Assignment(*entry) for entry in placed))))

    together = found(("a", 0, Bin("d0")), ("a", 1, Bin("d0")), ("c", 0, Bin("d0", "1g.10gb", 1)))
    assert "'d0' holds 107374182400 bytes and has 85899345920" in together
    assert "'d0' has the load 1.2, and 1 is allowed" in together
    assert "'d0' is shared by 2 replicas; 1 may" in together
    assert "device 'd0' is used whole and partitioned at once" in together
    assert "'a' has 2 replicas in domain 'z0'; 1 to 1 may be" in together
    assert "workload 'b' has 0 replicas; 1 are wanted" in together
    assert "workload 'b' may not be on 'd0', of class 'H100-80GB'" in found(("b", 0, Bin("d0")))
    assert "device 'd0' can have no MIG slice '1g.10gb' that begins at 7" in found(("c", 0, Bin("d0", "1g.10gb", 7)))
    assert "workload 'c' is on device 'x', which is not there" in found(("c", 0, Bin("x")))
    assert "workload 'x' is not in the problem" in found(("x", 0, Bin("d0")))
    assert "replica 0 of 'c' is in 2 places" in found(("c", 0, Bin("d0")), ("c", 0, Bin("d1")))
    assert "overlap" in found(("a", 0, Bin("d0", "4g.40gb", 0)), ("c", 0, Bin("d0", "1g.10gb", 3)))


def test_hosts_are_devices(tmp_path: Path) -> None:
    """Two GPUs of one host are counted from 0, and what a host does not say is the caller's."""
    path = tmp_path / "fleet.toml"
    first = '[[host]]\nname = "a"\ndomain = "zone-a"\nnum_devices = 2\nmig = true\n'
    path.write_text(first + '[[host]]\nname = "b"\ncost_per_hour = 1\n')
    mig = known_mig()[H100]
    assert (
        Device("a-0", H100, 80 * GIB, "a", "zone-a", 0, 4, 2.5, mig),
        Device("a-1", H100, 80 * GIB, "a", "zone-a", 1, 4, 2.5, mig),
        Device("b", H100, 80 * GIB, "b", "", 0, 4, 1.0),
    ) == read_fleet(path, GPU, mig)


def test_a_runtime_takes_its_part_of_each_slice() -> None:
    """What a slice has left is less by it, and a slice with nothing left is none."""
    assert {p.memory_bytes - 600 for p in known_mig()[H100]} == {p.memory_bytes for p in mig_profiles(H100, 600)}
    assert ["7g.80gb"] == [profile.name for profile in mig_profiles(H100, 60 * GIB)]
    assert () == mig_profiles("T4")
