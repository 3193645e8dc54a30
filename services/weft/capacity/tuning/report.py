"""The outcome of a search as facts for JSON, and as text."""

import os
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from weft.capacity.machine.profile import cpu_model
from weft.capacity.tuning.contest import Comparison
from weft.capacity.tuning.measurement import OBJECTIVES, Goal, Measurement
from weft.capacity.tuning.search import SearchResult
from weft.capacity.tuning.space import IN_PROCESS, SearchSpace
from weft.capacity.tuning.trials import TrialRecord, latencies, pareto

_TITLES = {"throughput": "requests/s", "cpu": "CPU-s/1000"}


def facts(
    space: SearchSpace, goal: Goal, records: Sequence[TrialRecord], result: SearchResult, setup: Mapping[str, Any]
) -> dict[str, Any]:
    """All that a search found, as plain values for JSON."""
    front = pareto(records)
    return {
        **setup,
        "machine": machine(),
        "num_configurations": space.size,
        "trials": [_trial(space, number, record) for number, record in enumerate(records)],
        "pareto": [number for number, record in enumerate(records) if record in front],
        "pick": {
            "changes": _changes(space, result.pick),
            "mesh_arguments": space.mesh_arguments(result.pick),
            "why": result.why,
        },
        "confirmation": None if result.confirmation is None else _comparison(goal, result.confirmation),
    }


def text(found: Mapping[str, Any]) -> str:
    """The same for people: the Pareto set, the pick, what it gains."""
    return "\n".join(_lines(found))


def provenance(found: Mapping[str, Any], date: str) -> str:
    """One line for the head of a configuration: what it was tuned for, where, and what that gained."""
    gains = found["confirmation"]["gains"]
    shown = ", ".join(f"{name} {gains[name]['median']:.2f} times as good" for name in OBJECTIVES)
    arguments = " ".join(found["pick"]["mesh_arguments"])
    return (
        f"{found['graph']}, {', '.join(found['slo'])}, for {found['objective']}, {date}, {found['machine']}: {shown} "
        f"as before{f', with weft up {arguments}' if arguments else ''}"
    )


def machine() -> str:
    """CPU and cores of this machine."""
    return f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores"


def _trial(space: SearchSpace, number: int, record: TrialRecord) -> dict[str, Any]:
    return {
        "number": number,
        "outcome": record.outcome,
        "reason": record.reason,
        "changes": _changes(space, record.configuration),
        "concurrency": record.level,
        "values": dict(record.values),
        "gains": dict(record.gains),
        "latency_ms": dict(record.latency_ms),
    }


def _changes(space: SearchSpace, configuration: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {key: {"from": old, "to": new} for key, (old, new) in space.changes(configuration).items()}


def _comparison(goal: Goal, found: Comparison) -> dict[str, Any]:
    return {
        "rounds": len(found.pairs),
        "gains": {
            name: {"median": median(values), "least": min(values), "most": max(values)}
            for name, values in found.gains.items()
        },
        "shipped": _measurement(goal, found.old),
        "pick": _measurement(goal, found.new),
    }


def _measurement(goal: Goal, measured: Measurement) -> dict[str, Any]:
    return {
        "concurrency": measured.level,
        "throughput_per_s": measured.throughput_per_s,
        "cpu_s_per_1000": measured.cpu_s_per_1000,
        "latency_ms": latencies(measured),
        "violations": goal.violations(measured),
    }


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    percentile = found["slo"][0].partition("=")[0]
    yield f"{found['graph']}: {', '.join(found['slo'])}; {found['load']}; {found['requests']}; {found['machine']}"
    by_outcome: dict[str, int] = {}
    for trial in found["trials"]:
        by_outcome[trial["outcome"]] = by_outcome.get(trial["outcome"], 0) + 1
    yield f"{len(found['trials'])} trials: {', '.join(f'{count} {name}' for name, count in by_outcome.items())}"
    yield ""
    yield f"{'trial':>5} {_TITLES['throughput']:>11} {_TITLES['cpu']:>11} {percentile + ' ms':>9}  changes"
    for number in found["pareto"]:
        trial = found["trials"][number]
        values = trial["values"]
        yield (
            f"{number:>5} {values['throughput']:>11.1f} {values['cpu']:>11.3f} {values['latency']:>9.2f}  "
            f"{_shown(trial['changes']) or 'as it is shipped'}"
        )
    yield ""
    pick = found["pick"]
    yield f"pick: {_shown(pick['changes']) or 'as it is shipped'} ({pick['why']})"
    if confirmation := found["confirmation"]:
        gains = ", ".join(
            f"{name} {gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"
            for name, gain in confirmation["gains"].items()
        )
        yield f"against what is shipped, {confirmation['rounds']} rounds in turn, times as good: {gains}"
    if pick["mesh_arguments"]:
        yield f"start it with: weft up {' '.join(pick['mesh_arguments'])}"


def _shown(changes: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{key} {change['to']}" for key, change in sorted(changes.items(), key=lambda item: item[0] != IN_PROCESS)
    )
