"""What cannot be placed is refused or explained: what is wrong, the value, what is allowed, the cure."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.capacity.placement.problems import GIB, H100, gpus, num_unplaced

from weft.base.errors import InvalidArgumentError
from weft.capacity.placement import Assignment, Bin, Device, Problem, Solution, Workload, place
from weft.capacity.placement.solution import faults

MODEL = Workload("m", GIB, {"*": 0.1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": -1}, "workload 'm': memory_bytes is -1; allowed: a whole number from 0 to"),
        ({"memory_bytes": 1.5}, "workload 'm': memory_bytes is 1.5"),
        ({"memory_bytes": True}, "workload 'm': memory_bytes is True"),
        ({"memory_bytes": 1 << 70}, "allowed: a whole number from 0 to"),
        ({"num_replicas": -1}, "num_replicas is -1"),
        ({"num_replicas": 10**9}, "num_replicas is 1000000000; allowed: a whole number from 0 to 5000"),
        ({"load": {}}, "workload 'm': load is empty"),
        ({"load": {"*": float("nan")}}, "load on '*' is nan; allowed: a number from 0"),
        ({"load": {"*": float("inf")}}, "load on '*' is inf"),
        ({"load": {"*": "much"}}, "load on '*' is 'much'"),
        ({"cpus": -2}, "workload 'm': cpus is -2"),
        ({"apart_from": frozenset({"x"})}, "apart_from names 'x', which is no workload; known: 'm'"),
        ({"name": ""}, "a workload has the name ''"),
    ],
)
def test_a_wrong_workload_is_refused(change: dict[str, Any], message: str) -> None:
    """The message names the workload, the value and what is allowed."""
    with pytest.raises(InvalidArgumentError) as caught:
        Problem((replace(MODEL, **change),), gpus(1))
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, "device 'd0': memory_bytes is 0; allowed: a whole number from 1"),
        ({"max_models": 0}, "device 'd0': max_models is 0"),
        ({"cost_per_hour": -1.0}, "device 'd0': cost_per_hour is -1.0"),
        ({"cost_per_hour": float("nan")}, "cost_per_hour is nan"),
        ({"index": -1}, "device 'd0': index is -1"),
        ({"device_class": "*"}, "device_class is '*'; name one"),
    ],
)
def test_a_wrong_device_is_refused(change: dict[str, Any], message: str) -> None:
    """The message names the device, the value and what is allowed."""
    with pytest.raises(InvalidArgumentError) as caught:
        Problem((MODEL,), (replace(gpus(1)[0], **change),))
    assert message in caught.value.message


def test_a_wrong_whole_is_refused() -> None:
    """No device, a name twice, a host in two zones, a share that is none."""
    for problem, message in [
        (lambda: Problem((MODEL,), ()), "no device is given"),
        (lambda: Problem((MODEL, MODEL), gpus(1)), "2 workloads have the name 'm'"),
        (lambda: Problem((MODEL,), (*gpus(1), *gpus(1))), "2 devices have the name 'd0'"),
        (lambda: Problem((MODEL,), gpus(1), max_load=0.0), "max_load is 0.0; allowed: above 0, at most 1"),
        (
            lambda: Problem((MODEL,), (*gpus(1), Device("x", H100, GIB, "h0", "elsewhere"))),
            "device 'x' puts host 'h0' into failure domain 'elsewhere'",
        ),
        (
            lambda: Problem(tuple(replace(MODEL, name=f"m{i}", num_replicas=5000) for i in range(2)), gpus(1)),
            "10000 replicas; at most 5000",
        ),
    ]:
        with pytest.raises(InvalidArgumentError) as caught:
            problem()
        assert message in caught.value.message


@pytest.mark.parametrize(
    ("problem", "cause"),
    [
        (Problem((Workload("m", GIB, {"TPU": 0.1}),), gpus(1)), "class 'TPU', and there are only 'H100-80GB'"),
        (
            Problem((Workload("m", 90 * GIB, {"*": 0.1}),), gpus(1)),
            "a replica takes 90.00 GiB and the largest device that it may use, 'd0', has 80.00 GiB: 10.00 GiB too much",
        ),
        (Problem((Workload("m", GIB, {"*": 1.5}),), gpus(1)), "needs 1.5 of the compute of a device"),
        (
            Problem((Workload("m", GIB, {"*": 0.1}, 3, apart_from=frozenset({"m"})),), gpus(4)),
            "3 replicas must be on different hosts (apart_from), and 2 have a device",
        ),
        (
            Problem((Workload("m", 60 * GIB, {"*": 0.1}, 6, spread=True),), gpus(5)),
            "'z2' has room for 1, were it empty; give up spread",
        ),
        (
            Problem((Workload("m", 60 * GIB, {"*": 0.1}, 3),), gpus(2)),
            "all replicas together take 180.00 GiB and all devices have 160.00 GiB: 20.00 GiB are missing",
        ),
        (Problem((Workload("m", GIB, {"*": 0.9}, 3),), gpus(2)), "need the compute of 2.7 devices at least"),
        (Problem((Workload("m", 50 * GIB, {"*": 0.1}, 3),), gpus(2)), "with 1 more of"),
        (Problem((Workload("m", GIB, {"*": 0.1}, 3),), gpus(1, max_models=2)), "max_models) everything fits"),
        (
            Problem(
                (
                    Workload("m", GIB, {"*": 0.1}, apart_from=frozenset({"n"})),
                    Workload("n", GIB, {"*": 0.1}),
                ),
                gpus(2),
            ),
            "without apart_from everything fits",
        ),
        (Problem((Workload("m", GIB, {"*": 0.5}, 2),), gpus(1), max_load=0.9), "3 are missing"),
    ],
)
def test_what_does_not_fit_is_explained(problem: Problem, cause: str) -> None:
    """The reason names the constraint that cannot hold and by how much, or what would make everything fit."""
    if cause == "3 are missing":
        cause = "at max_load 0.9 give 0.9: 0.1 are missing"
    solution = place(problem)
    assert num_unplaced(solution) > 0
    assert cause in solution.unplaced[0].why


def test_the_rest_is_placed_where_one_does_not_fit() -> None:
    """A model that fits nowhere keeps no other from its place."""
    problem = Problem((Workload("huge", 900 * GIB, {"*": 0.1}), MODEL), gpus(1))
    solution = place(problem)
    assert ["m"] == [entry.workload for entry in solution.assignments]
    assert ["huge"] == [entry.workload for entry in solution.unplaced]
    assert [] == faults(problem, solution)


def test_every_broken_rule_is_named() -> None:
    """Each fault of a placement is found: memory, load, sharing, class, spread, hosts, slices, counting."""
    problem = Problem(
        (
            Workload("a", 50 * GIB, {H100: 0.6}, 2, spread=True, apart_from=frozenset({"a"})),
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
    assert "'a' and 'a' are both on host 'h0'" in together
    assert "'a' has 2 replicas in domain 'z0'; 1 to 1 may be" in together
    assert "workload 'b' has 0 replicas; 1 are wanted" in together
    assert "workload 'b' may not be on 'd0', of class 'H100-80GB'" in found(("b", 0, Bin("d0")))
    assert "device 'd0' can have no MIG slice '1g.10gb' that begins at 7" in found(("c", 0, Bin("d0", "1g.10gb", 7)))
    assert "workload 'c' is on device 'x', which is not there" in found(("c", 0, Bin("x")))
    assert "workload 'x' is not in the problem" in found(("x", 0, Bin("d0")))
    assert "replica 0 of 'c' is in 2 places" in found(("c", 0, Bin("d0")), ("c", 0, Bin("d1")))
    assert "overlap" in found(("a", 0, Bin("d0", "4g.40gb", 0)), ("c", 0, Bin("d0", "1g.10gb", 3)))
