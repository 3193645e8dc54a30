"""``python -m benchmarks.placement``: how good placements are, against the best there is and against Kubernetes.

Random problems with a fixed seed: some with three classes of device at their price, spread models and limits of sharing
(of these the simulated scheduler of Kubernetes places the same), some with GPUs that can be partitioned. The best is
what the solver finds with much more time, or, where it proves nothing, the bound that it has: a gap is then too large,
never too small. Times are CPU-seconds. The status is 1 if a target is missed.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.kube_scheduler import schedule
from benchmarks.report import table
from weft.capacity.placement import Device, Problem, Solution, Workload, place
from weft.capacity.placement.problem import known_mig
from weft.capacity.placement.solution import cost_per_hour, faults, use_of

GIB = 1 << 30
#: Class, GiB, price per hour, compute as a multiple of the first.
CLASSES = (("A30-24GB", 24, 0.6, 1.0), ("L40S-48GB", 48, 1.1, 2.2), ("H100-80GB", 80, 2.5, 6.0))
#: The mean cost above the least that ``place`` is allowed.
MAX_MEAN_GAP = 0.02
SLACK = 1e-6


class Outcome(NamedTuple):
    """What one way made of one problem."""

    cost: float
    num_devices: int
    fraction_placed: float
    max_load: float
    cpu_s: float
    is_valid: bool


def problems(num: int, seed: int) -> Iterator[tuple[str, Problem]]:
    """Seeded problems; every fifth has GPUs with MIG, every fifth too few devices."""
    for number in range(num):
        rng = random.Random(f"{seed}-{number}")
        if number % 5 == 4:
            yield "mig", _partitioned(rng)
        else:
            yield ("tight", _mixed(rng, 4)) if number % 5 == 3 else ("roomy", _mixed(rng, 15))


def _mixed(rng: random.Random, num_devices: int) -> Problem:
    workloads = []
    for i in range(rng.randint(5, 9)):
        need = rng.uniform(0.05, 0.8)  # of the smallest class
        memory_gib = rng.randint(1, 22)
        load = {name: need / speed for name, _, _, speed in CLASSES}
        if rng.random() < 0.15:
            memory_gib, load = rng.randint(25, 60), {name: load[name] for name, gib, _, _ in CLASSES if gib > 24}
        workloads.append(Workload(f"m{i}", memory_gib * GIB, load, rng.randint(1, 4), spread=rng.random() < 0.4))
    devices = []
    for i in range(num_devices):
        name, gib, price, _ = CLASSES[i % 3]
        devices.append(Device(f"d{i}", name, gib * GIB, f"h{i}", f"z{i // 3 % 3}", 0, rng.choice((2, 4, 8)), price))
    return Problem(tuple(workloads), tuple(devices), 0.9)


def _partitioned(rng: random.Random) -> Problem:
    """Models that do not share what they run on."""
    name = "H100-80GB"
    workloads = tuple(
        Workload(
            f"m{i}", rng.choice((4, 8, 9, 15, 18, 30, 38, 60)) * GIB, {name: rng.uniform(0.02, 0.3)}, rng.randint(1, 3)
        )
        for i in range(rng.randint(4, 7))
    )
    mig = known_mig()[name]
    return Problem(workloads, tuple(Device(f"d{i}", name, 80 * GIB, f"h{i}", "", 0, 1, 2.5, mig) for i in range(8)))


def measured(problem: Problem, solution: Solution, cpu_s: float) -> Outcome:
    """Figures of a placement."""
    loads: dict[str, float] = {}
    for bin, use in use_of(problem, solution).items():
        loads[bin.device] = loads.get(bin.device, 0.0) + use.load
    return Outcome(
        cost_per_hour(problem, solution),
        len(solution.devices),
        len(solution.assignments) / max(problem.num_replicas, 1),
        max(loads.values(), default=0.0),
        cpu_s,
        not faults(problem, solution),
    )


def run(num: int, seed: int, exact_s: float) -> bool:
    """Place all problems in every way and print what came of it; whether all targets are met."""
    outcomes: dict[str, list[Outcome]] = {"place": [], "kubernetes": [], "kubernetes packing": []}
    gaps: list[float] = []
    exact_cpu_s, num_proved, num_incomplete = [], 0, 0
    failures: list[str] = []
    for number, (kind, problem) in enumerate(problems(num, seed)):
        solutions: dict[str, Solution] = {}
        for name in ("place",) if kind == "mig" else outcomes:
            start = time.process_time()
            solutions[name] = _placed(problem, name, random.Random(f"{seed}-{number}-arrivals"))
            cpu_s = time.process_time() - start
            outcome = measured(problem, solutions[name], cpu_s)
            if not outcome.is_valid:
                failures.append(f"problem {number}: {name} breaks a rule: {faults(problem, solutions[name])[0]}")
            if kind != "mig":
                outcomes[name].append(outcome)
        ours = measured(problem, solutions["place"], 0.0)
        start = time.process_time()
        best = place(problem, time_limit_s=exact_s)
        exact_cpu_s.append(time.process_time() - start)
        most = measured(problem, best, 0.0).fraction_placed
        if most < 1:
            num_incomplete += 1
        is_proved = best.cost_bound >= cost_per_hour(problem, best) - SLACK
        num_proved += is_proved
        least = cost_per_hour(problem, best) if is_proved else best.cost_bound
        if ours.fraction_placed >= most - SLACK:
            gaps.append(max(ours.cost / least - 1, 0.0) if least else 0.0)
        for name in ("kubernetes", "kubernetes packing") if kind != "mig" else ():
            theirs = outcomes[name][-1]
            if ours.fraction_placed < theirs.fraction_placed - SLACK:
                failures.append(
                    f"problem {number}: {name} places {theirs.fraction_placed:.0%}, we {ours.fraction_placed:.0%}"
                )
            elif abs(ours.fraction_placed - theirs.fraction_placed) < SLACK and ours.cost > theirs.cost + SLACK:
                failures.append(f"problem {number}: {name} costs {theirs.cost:.2f}, we {ours.cost:.2f}")
        if sys.stderr.isatty():
            print(f"\r{number + 1}/{num}", end="", file=sys.stderr)
    _show(outcomes, gaps, exact_cpu_s, num_proved, num, num_incomplete)
    if (mean := statistics.fmean(gaps)) > MAX_MEAN_GAP:
        failures.append(f"the mean cost of place is {mean:.2%} above the least; at most {MAX_MEAN_GAP:.0%}")
    print("\n".join(f"MISSED: {failure}" for failure in failures) or "all targets are met")
    return not failures


def _placed(problem: Problem, name: str, rng: random.Random) -> Solution:
    return place(problem) if name == "place" else schedule(problem, rng, packs=name.endswith("packing"))


def _show(
    outcomes: dict[str, list[Outcome]],
    gaps: Sequence[float],
    exact_cpu_s: Sequence[float],
    num_proved: int,
    num: int,
    num_incomplete: int,
) -> None:
    print(
        f"{num} problems; the least cost is proved for {num_proved}; in {num_incomplete} not all replicas have a place"
    )
    print(f"cost above the least, of {len(gaps)}: mean {statistics.fmean(gaps):.2%}, worst {max(gaps):.2%}\n")
    rows = []
    every = [
        all(outcomes[name][i].fraction_placed >= 1 - SLACK for name in outcomes) for i in range(len(outcomes["place"]))
    ]
    for name, found in outcomes.items():
        same = [outcome for outcome, is_whole in zip(found, every, strict=True) if is_whole]
        rows.append(
            [
                name,
                f"{statistics.fmean(o.fraction_placed for o in found):.1%}",
                f"{sum(o.fraction_placed >= 1 - SLACK for o in found)}/{len(found)}",
                f"{statistics.fmean(o.cost for o in same):.2f}",
                f"{statistics.fmean(o.num_devices for o in same):.2f}",
                f"{statistics.fmean(o.max_load for o in same):.2f}",
                f"{statistics.fmean(o.cpu_s for o in found):.3f}",
            ]
        )
    heads = ["without MIG", "placed", "all placed", "cost/h", "devices", "max load", "CPU-s"]
    print(table([heads, *rows], left_columns={0}))
    print(f"cost, devices and load: of the {sum(every)} problems in which every way places all replicas")
    print(f"it took {statistics.fmean(exact_cpu_s):.2f} CPU-s on average, {max(exact_cpu_s):.1f} at most")


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exact-s", type=float, default=20.0, help="deterministic seconds to find the least")
    options = parser.parse_args()
    return 0 if run(options.problems, options.seed, options.exact_s) else 1


if __name__ == "__main__":
    sys.exit(main())
