"""What a version costs, and the report as JSON and as a picture."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from weft.optimize.cost import CostMeter, Sample, VersionCost, VersionProcess, objective_ratio
from weft.optimize.gate import GateCandidate, Loss, pick
from weft.optimize.methods.method import Inputs
from weft.optimize.report import CandidateReport, Report, draw


class ScriptedProcess(VersionProcess):
    """Needs a given CPU time for a row, of which the machine makes more and more as time passes."""

    clock: ClassVar = [1.0]

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._rows: dict[str, int] = {}
        self.measured: list[int] = []

    def send(self, name: str, requests: Sequence[Inputs]) -> None:
        """Note how many rows the requests have."""
        self._rows[name] = len(requests[0]["X"])

    def measure(self, name: str, num_requests: int, num_inflight: int = 1) -> Sample:
        """Without doing anything."""
        self.clock[0] *= 1.01
        self.measured.append(num_requests)
        rows = self._rows[name]
        cpu_s = self._cpu_s * rows * self.clock[0]
        total_s = cpu_s * num_requests
        return Sample(total_s / num_inflight**0.5, [cpu_s] * num_requests, total_s, rows * num_requests)


@pytest.fixture
def costs() -> tuple[dict[int, VersionCost], dict[int, VersionCost]]:
    """Of an original, and of a candidate that needs half of its CPU time."""
    ScriptedProcess.clock = [1.0]
    requests = {rows: [{"X": np.zeros((rows, 2))}] * 3 for rows in (1, 32)}
    original, candidate = ScriptedProcess(0.002), ScriptedProcess(0.001)
    return CostMeter(original, requests, 4).measure(candidate)


def test_a_machine_that_slows_down_does_not_change_the_ratio(
    costs: tuple[dict[int, VersionCost], dict[int, VersionCost]],
) -> None:
    """Original and candidate take turns in going first; the median of the rounds is what they need."""
    original, candidate = costs
    assert {1, 32} == set(original)
    assert all(cost.ratio == 1.0 for cost in original.values())
    assert all(cost.ratio == pytest.approx(0.5, rel=0.002) for cost in candidate.values())
    assert all(cost.time_ratio == pytest.approx(0.5, rel=0.002) for cost in candidate.values())
    assert all(cost.busy_time_ratio == pytest.approx(0.5, rel=0.002) for cost in candidate.values())
    assert 2.0 < original[1].cpu_s_per_1000 < 3.0
    assert original[32].rows_per_s == pytest.approx(2000 / original[32].cpu_s_per_1000, rel=0.05)  # half the time
    assert original[32].p50_ms > 20 * original[1].p50_ms


def test_the_objective_says_which_requests_are_compared(
    costs: tuple[dict[int, VersionCost], dict[int, VersionCost]],
) -> None:
    """Faster by rows a second with several requests in flight, and slower one at a time: no version for latency."""
    candidate = {
        rows: cost._replace(time_ratio=1.065, busy_time_ratio={1: 2.0, 32: 0.8}[rows])
        for rows, cost in costs[1].items()
    }
    picked = {
        objective: pick([GateCandidate("a", objective_ratio(candidate, objective), 1)])[0]
        for objective in ("latency", "throughput")
    }
    assert {"latency": "", "throughput": "a"} == picked


def test_a_round_takes_as_long_as_it_should() -> None:
    """Many requests of a cheap model, few of a dear one; at once no fewer than are in flight twice."""
    cheap, dear = ScriptedProcess(1e-6), ScriptedProcess(10.0)
    for process in (cheap, dear):
        CostMeter(process, {1: [{"X": np.zeros((1, 2))}]}, 1).measure_original()
    assert ([1, 400, 400], [1, 8, 2]) == (cheap.measured, dear.measured)


@pytest.fixture
def report(costs: tuple[dict[int, VersionCost], dict[int, VersionCost]]) -> Report:
    """Of one candidate in each state."""
    original, candidate = costs
    states = {"passes": Loss(0.001, 0.0, 0.004, 100, 1), "refused": Loss(0.3, 0.2, 0.4, 100, 30)}
    candidates = [
        CandidateReport(state, state, loss=loss, costs=candidate, original_costs=original, size_bytes=7)
        for state, loss in states.items()
    ]
    return Report(
        model="m",
        version=1,
        graph="g/1",
        metric="cosine",
        meaning="what is lost",
        max_loss=0.005,
        objective="latency",
        data="d.jsonl",
        data_sha256="0",
        num_calibration_rows=5,
        num_held_out_rows=100,
        num_unanswered_rows=0,
        seed=0,
        size_bytes=9,
        created="2026-01-01T00:00:00+00:00",
        software={"weft": "0"},
        costs=original,
        candidates=[*candidates, CandidateReport("unsuitable", "unsuitable", "it is no model of that kind")],
        picked="passes",
        written=2,
    )


def test_the_report_is_json(report: Report) -> None:
    """With names for all figures."""
    facts = json.loads(json.dumps(report.as_json()))
    assert 0.004 == facts["candidates"][0]["loss"]["high"]
    assert facts["candidates"][1]["costs"]["32"]["ratio"] == pytest.approx(0.5, rel=0.002)
    assert facts["candidates"][2]["loss"] is None
    assert {"cpu_s_per_1000", "rows_per_s", "time_ratio", "busy_time_ratio"} <= set(facts["costs"]["1"])


@pytest.mark.parametrize("max_loss", [0.005, 0.0])
def test_the_picture_has_who_was_measured(report: Report, max_loss: float) -> None:
    """In each plot the original and both candidates; what loses far more than the limit is a triangle at the top."""
    report.max_loss = max_loss
    root = ET.fromstring(draw(report))
    svg = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{svg}text")]
    assert (2, 2, 2, 0) == tuple(texts.count(name) for name in ("original", "passes", "refused", "unsuitable"))
    marks = [element.tag.removeprefix(svg) for element in root.iter() if "mark" in element.attrib.get("class", "")]
    assert (2, 4) == (marks.count("path"), marks.count("circle"))
