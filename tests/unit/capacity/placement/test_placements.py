"""Where models go, why some go nowhere, and what a change moves: scripts of ``placements.txt``."""

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases, says
from tests.unit.capacity.placement.problems import GIB, gpus

from weft.capacity.placement import Device, Problem, Solution, Workload, place
from weft.capacity.placement.place import CheckedChange, check_change
from weft.capacity.placement.solution import faults, use_of

pytest.importorskip("ortools")


def _fields(words: tuple[str, ...]) -> dict[str, Any]:
    return {name: ast.literal_eval(value) for name, _, value in (word.partition("=") for word in words)}


class Script:
    """Runs the lines of a case; each command is a method, and what asks places what was described so far."""

    def __init__(self) -> None:
        self.models: dict[str, Workload] = {}
        self.devices: dict[str, Device] = {}
        self.max_load = 1.0
        self.before: tuple[Problem, Solution] | None = None

    def run_lines(self, lines: list[str]) -> None:
        for line in lines:
            command, *words = line.split()
            getattr(self, command)(*words)
        assert [] == faults(self.problem, self.checked().solution if self.before else self.solution())

    def gpus(self, number: str, *words: str) -> None:
        fields = _fields(words)
        made = gpus(int(number), with_mig=fields.pop("mig", False), **fields)
        self.devices |= {device.name: device for device in made}

    def device(self, name: str, kind: str, gib: str, cost: str) -> None:
        self.devices[name] = Device(name, kind, int(gib) * GIB, cost_per_hour=float(cost))

    def model(self, name: str, gib: str, *words: str) -> None:
        load = {kind: float(share) for kind, _, share in (word.partition(":") for word in words if ":" in word)}
        fields = _fields(tuple(word for word in words if ":" not in word))
        self.models[name] = Workload(name, int(gib) * GIB, load, **fields)

    def at_most(self, load: str) -> None:
        self.max_load = float(load)

    @property
    def problem(self) -> Problem:
        return Problem(tuple(self.models.values()), tuple(self.devices.values()), self.max_load)

    def solution(self) -> Solution:
        return place(self.problem)

    def on(self, *names: str) -> None:
        assert (list(names), ()) == (self.solution().devices, self.solution().unplaced)

    def count(self, number: str) -> None:
        assert int(number) == len(self.solution().devices)

    def slices(self, device: str, *profiles: str) -> None:
        assert list(profiles) == sorted(bin.profile for bin in self.solution().slices(device))

    def zones(self, *counts: str) -> None:
        found = Counter(self.devices[bin.device].domain for _, _, bin in self.solution().assignments)
        assert [int(count) for count in counts] == sorted(found.values())

    def loads(self, *loads: str) -> None:
        found = [use.load for use in use_of(self.problem, self.solution()).values()]
        assert [float(load) for load in loads] == pytest.approx(found)

    def left(self, name: str, *words: str) -> None:
        first, *rest = self.solution().unplaced
        assert f"{first.workload}:" == name
        assert [] == rest
        assert says(" ".join(words), first.why)

    def then(self) -> None:
        self.before = self.problem, self.solution()

    def without(self, name: str) -> None:
        assert self.before is not None
        del self.devices[self.before[1].devices[0] if name == "first" else name]

    def checked(self) -> CheckedChange:
        assert self.before is not None
        return check_change(*self.before, self.problem)

    def moves(self, number: str) -> None:
        assert int(number) == len(self.checked().moves)

    def unmoved(self) -> None:
        assert self.checked().is_unmoved

    def moved(self) -> None:
        assert not self.checked().is_unmoved

    def why(self, *words: str) -> None:
        assert all(says(" ".join(words), why) for _, why in self.checked().moves)

    def says(self, *words: str) -> None:
        assert says(" ".join(words), self.checked().text())


@cases(Path(__file__).with_name("placements.txt"))
def test_script(case: Case) -> None:
    """The placement of a script holds every rule, and is the one that the script says."""
    Script().run_lines(case.lines)
