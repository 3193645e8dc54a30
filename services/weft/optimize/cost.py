"""What a version costs: CPU time, latency and throughput of the model alone, a candidate and the original in turn."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weft.optimize.methods.method import Inputs
from weft.optimize.model_process import Sample, VersionProcess

#: Time that the original should need for the requests of one round, in seconds of CPU.
_ROUND_CPU_S = 0.25
_MIN_REQUESTS, _MAX_REQUESTS = 2, 400
#: What the new version has to be faster in -> which of the measured numbers of rows tells.
OBJECTIVES: Mapping[str, Callable[[Iterable[int]], int]] = {"latency": min, "throughput": max}


class VersionCost(NamedTuple):
    """What a version costs at one number of rows a request.

    Attributes:
        cpu_s_per_1000: CPU-seconds for 1000 rows; median of the rounds.
        p50_ms, p99_ms: Latency of a request with no other in work.
        ratio: CPU time as a share of the original's; median of the rounds' ratios. 1 for the original.
        time_ratio: The same of the median time of a request.
    """

    cpu_s_per_1000: float
    p50_ms: float
    p99_ms: float
    ratio: float
    time_ratio: float


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
            rounds: list[tuple[Sample, Sample]] = []
            for index in range(self._num_rounds):
                order = (self._original, candidate) if index % 2 else (candidate, self._original)
                samples = [process.measure(str(rows), num_requests) for process in order]
                rounds.append((samples[0], samples[1]) if index % 2 else (samples[1], samples[0]))
            first, second = zip(*rounds, strict=True)
            ratios = [other.cpu_s / max(own.cpu_s, 1e-9) for own, other in rounds]
            time_ratios = [
                np.median(other.latencies_s) / max(np.median(own.latencies_s), 1e-9) for own, other in rounds
            ]
            costs[0][rows] = _cost(first)
            costs[1][rows] = _cost(second, float(np.median(ratios)), float(np.median(time_ratios)))
        return costs

    def measure_original(self) -> dict[int, VersionCost]:
        """Cost of the original alone, for a report without candidates."""
        return {
            rows: _cost([self._original.measure(str(rows), num) for _ in range(self._num_rounds)])
            for rows, num in self._num_requests.items()
        }


def objective_ratio(costs: Mapping[int, VersionCost], objective: str) -> float:
    """Time by an objective: of a request with one row, or with the most rows."""
    return costs[OBJECTIVES[objective](costs)].time_ratio


def _cost(samples: Sequence[Sample], ratio: float = 1.0, time_ratio: float = 1.0) -> VersionCost:
    latencies_ms = np.concatenate([sample.latencies_s for sample in samples]) * 1000
    cpu_s = float(np.median([sample.cpu_s / max(sample.num_rows, 1) for sample in samples]))
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    return VersionCost(cpu_s * 1000, float(p50), float(p99), ratio, time_ratio)
