"""What a version costs: CPU time, latency and throughput of the model alone, a candidate and the original in turn."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weft.optimize.methods.method import Inputs
from weft.optimize.model_process import Sample, VersionProcess

#: Time that the original should need for the requests of one round, in seconds of CPU.
_ROUND_CPU_S = 0.25
_MIN_REQUESTS, _MAX_REQUESTS = 2, 400
#: Requests in flight where throughput is measured.
NUM_INFLIGHT = 4
OBJECTIVES = ("latency", "throughput")


class VersionCost(NamedTuple):
    """What a version costs at one number of rows a request.

    Attributes:
        cpu_s_per_1000: CPU-seconds for 1000 rows; median of the rounds.
        p50_ms, p99_ms: Latency of a request with no other in work.
        rows_per_s: With ``NUM_INFLIGHT`` requests in work; median of the rounds.
        ratio: CPU time as a share of the original's; median of the rounds' ratios. 1 for the original.
        time_ratio: The same of the median time of a request with no other in work.
        busy_time_ratio: The same of the time for a row with ``NUM_INFLIGHT`` requests in work.
    """

    cpu_s_per_1000: float
    p50_ms: float
    p99_ms: float
    rows_per_s: float
    ratio: float = 1.0
    time_ratio: float = 1.0
    busy_time_ratio: float = 1.0


class CostMeter:
    """Compares candidates with the original.

    Args:
        original: Runs as long as candidates are measured.
        requests: Requests by rows of each, for example of 1 row and of 32.
        num_rounds: How often each set is answered by both, in turn.
    """

    def __init__(self, original: VersionProcess, requests: Mapping[int, Sequence[Inputs]], num_rounds: int) -> None:
        self._original = original
        self._requests = requests
        self._num_rounds = num_rounds
        self._num_requests: dict[int, int] = {}
        for rows, some in requests.items():
            original.send(str(rows), some)
            trial = original.measure(str(rows), min(len(some), _MIN_REQUESTS))
            wanted = _ROUND_CPU_S * len(trial.latencies_s) / max(trial.cpu_s, 1e-6)
            self._num_requests[rows] = int(min(max(wanted, _MIN_REQUESTS), _MAX_REQUESTS))

    def measure(self, candidate: VersionProcess) -> tuple[dict[int, VersionCost], dict[int, VersionCost]]:
        """Cost of the original and of a candidate by rows of a request, measured in turn.

        Raises:
            UnavailableError: A request fails, or a process dies.
        """
        for rows, some in self._requests.items():
            candidate.send(str(rows), some)
        costs: tuple[dict[int, VersionCost], dict[int, VersionCost]] = ({}, {})
        for rows, num_requests in self._num_requests.items():
            own: list[_Round] = []
            other: list[_Round] = []
            for index in range(self._num_rounds):
                turns = [(self._original, own), (candidate, other)]
                for process, rounds in turns if index % 2 else reversed(turns):
                    rounds.append(_measure_round(process, rows, num_requests))
            costs[0][rows] = _cost(own)
            costs[1][rows] = _cost(other)._replace(
                ratio=_ratio(own, other, lambda one: one.alone.cpu_s),
                time_ratio=_ratio(own, other, lambda one: float(np.median(one.alone.latencies_s))),
                busy_time_ratio=_ratio(own, other, lambda one: one.busy.elapsed_s),
            )
        return costs

    def measure_original(self) -> dict[int, VersionCost]:
        """Cost of the original alone, for a report without candidates."""
        return {
            rows: _cost([_measure_round(self._original, rows, num) for _ in range(self._num_rounds)])
            for rows, num in self._num_requests.items()
        }


def objective_ratio(costs: Mapping[int, VersionCost], objective: str) -> float:
    """Time by an objective: of a request with one row alone, or of a row in the largest requests, several at once."""
    return costs[min(costs)].time_ratio if objective == "latency" else costs[max(costs)].busy_time_ratio


class _Round(NamedTuple):
    """The same requests one after another, and ``NUM_INFLIGHT`` at once."""

    alone: Sample
    busy: Sample


def _measure_round(process: VersionProcess, rows: int, num_requests: int) -> _Round:
    busy = process.measure(str(rows), max(num_requests, 2 * NUM_INFLIGHT), num_inflight=NUM_INFLIGHT)
    return _Round(process.measure(str(rows), num_requests), busy)


def _ratio(own: Sequence[_Round], other: Sequence[_Round], figure: Callable[[_Round], float]) -> float:
    return float(np.median([figure(b) / max(figure(a), 1e-9) for a, b in zip(own, other, strict=True)]))


def _cost(rounds: Sequence[_Round]) -> VersionCost:
    latencies_ms = np.concatenate([one.alone.latencies_s for one in rounds]) * 1000
    cpu_s = float(np.median([one.alone.cpu_s / max(one.alone.num_rows, 1) for one in rounds]))
    rows_per_s = float(np.median([one.busy.num_rows / max(one.busy.elapsed_s, 1e-9) for one in rounds]))
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    return VersionCost(cpu_s * 1000, float(p50), float(p99), rows_per_s)
