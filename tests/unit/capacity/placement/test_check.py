"""What a change moves, and why."""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from tests.unit.capacity.placement.problems import GIB, gpus, num_unplaced, problems

from weft.capacity.placement import Bin, Problem, Workload, place
from weft.capacity.placement.place import changes, check_change
from weft.capacity.placement.solution import faults, numbered

SMALL = Workload("small", 20 * GIB, {"*": 0.2}, 2)
LARGE = Workload("large", 50 * GIB, {"*": 0.5}, 2)
BEFORE = Problem((SMALL, LARGE), gpus(4))
PLACED = place(BEFORE)


def test_without_a_change_nothing_moves() -> None:
    """The same problem checked again is unmoved, and says so."""
    checked = check_change(BEFORE, PLACED, BEFORE)
    assert checked.is_unmoved
    assert "nothing has changed" in checked.text()


def test_a_device_that_is_gone_moves_what_it_held() -> None:
    """Only its replicas move, and the cause is that it is not there."""
    gone = PLACED.devices[0]
    after = replace(BEFORE, devices=tuple(device for device in BEFORE.devices if device.name != gone))
    checked = check_change(BEFORE, PLACED, after)
    held = {entry[:2] for entry in PLACED.assignments if entry.bin.device == gone}
    assert held == {(change.workload, change.replica) for change, _ in checked.moves}
    assert all(f"'{gone}', which is not there" in why for _, why in checked.moves)
    assert f"device '{gone}' is gone" in checked.text()
    assert not checked.is_unmoved


def test_a_model_that_grows_moves_as_little_as_can_be() -> None:
    """Memory that no longer fits moves one replica of each device, with both numbers."""
    after = replace(BEFORE, workloads=(replace(SMALL, memory_bytes=35 * GIB), LARGE))
    checked = check_change(BEFORE, PLACED, after)
    assert [] == faults(after, checked.solution)
    assert 2 == len(checked.moves)
    assert all("as it was, " in why and " bytes and has " in why for _, why in checked.moves)
    assert "model 'small': memory_bytes 20.00 GiB -> 35.00 GiB" in checked.text()


def test_a_higher_rate_moves_by_load() -> None:
    """Load that no longer fits is the cause, with both shares."""
    after = replace(BEFORE, workloads=(replace(SMALL, load={"*": 0.6}), LARGE))
    checked = check_change(BEFORE, PLACED, after)
    assert any("has the load 1.1, and 1 is allowed" in why for _, why in checked.moves)


def test_a_replica_more_starts_and_moves_nothing() -> None:
    """Growth beside what is there is no move."""
    after = replace(BEFORE, workloads=(replace(SMALL, num_replicas=3), LARGE))
    checked = check_change(BEFORE, PLACED, after)
    assert checked.is_unmoved
    assert "starts: small[2] on" in checked.text()


def test_a_replica_less_stops_and_moves_nothing() -> None:
    """Whichever replica it is that stops, the others stay."""
    after = replace(BEFORE, workloads=(replace(SMALL, num_replicas=1), LARGE))
    checked = check_change(BEFORE, PLACED, after)
    assert checked.is_unmoved
    assert "stops: small[" in checked.text()


def test_what_no_longer_fits_is_told() -> None:
    """A change that leaves no room is not unmoved, and the text has the cause."""
    after = replace(BEFORE, workloads=(SMALL, replace(LARGE, memory_bytes=100 * GIB)))
    checked = check_change(BEFORE, PLACED, after)
    assert not checked.is_unmoved
    assert "does not fit: 2 of 'large': a replica takes 100.00 GiB" in checked.text()


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
