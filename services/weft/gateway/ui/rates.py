"""Rates, latencies and shares from two answers of the router's ``Observe``."""

import math
from collections.abc import Callable, Collection, Iterable
from itertools import accumulate, zip_longest
from operator import add, sub
from typing import Any

from weft.base.statistics import LATENCY_BUCKETS_S
from weft.gateway.v2.routes import to_json
from weft.v2.client.frames import quantiles_ms
from weft_protos import graph_service_pb2 as pb

#: Kinds of nodes whose steps share the requests.
_SHARING = ("splitter", "switch", "cascade")
_NO_GRAPH, _NO_STEP = pb.ObservedGraph(), pb.ObservedStep()
_COUNTS = ("num_ok", "num_failed", "total_ns", "num_inflight")


class Sample:
    """Counters at one time, of all processes of the router together; ``at_s`` is in seconds of any clock."""

    def __init__(self, seen: pb.ObserveResponse, at_s: float) -> None:
        self.at_s, self.unix_ms = at_s, seen.unix_ms
        self.graphs: dict[tuple[str, str], pb.ObservedGraph] = {}
        self.steps: dict[tuple[str, str, str], pb.ObservedStep] = {}
        self.arms: dict[tuple[str, str, str], pb.Arm] = {}
        for graph in seen.graph:
            _merge(self.graphs, (graph.graph, graph.version), graph)
        for step in seen.step:
            _merge(self.steps, (step.graph, step.version, step.path), step)
        for one in sorted(seen.arm, key=lambda one: one.arm.num_pulls):
            self.arms[one.graph, one.arm.node, one.arm.step] = one.arm


def tick_of(old: Sample, new: Sample, looked_at: Collection[str]) -> dict[str, Any]:
    """What has happened between two samples; a graph without traffic is told only if it is looked at."""
    seconds = max(new.at_s - old.at_s, 1e-3)
    rows: list[dict[str, Any]] = []
    seen: list[dict[str, Any]] = []
    for (name, version), now in new.graphs.items():
        if now.is_model or not (now.num_ok or now.num_failed or now.num_inflight or name in looked_at):
            continue
        delta = _combined(now, old.graphs.get((name, version), _NO_GRAPH), sub)
        row = {
            "name": name,
            "version": version,
            "rate": round(delta.num_ok / seconds, 2),
            "errors": round(delta.num_failed / seconds, 2),
            "mean_ms": round(delta.total_ns / delta.num_ok / 1e6, 2) if delta.num_ok else None,
            "inflight": now.num_inflight,
        }
        rows.append(row)
        if name in looked_at:
            steps = {
                path: _combined(one, old.steps.get((name, version, path), _NO_STEP), sub)
                for (*graph, path), one in new.steps.items()
                if graph == [name, version]
            }
            arms = [to_json(arm) for (graph, *_), arm in new.arms.items() if graph == name]
            seen.append({**row, **_quantiles(delta.bucket), "steps": _steps(steps, seconds), "arms": arms})
    rows = [row for row in rows if row["rate"] or row["errors"] or row["inflight"]]
    total = {name: round(sum(row[name] for row in rows), 2) for name in ("rate", "errors", "inflight")}
    total_ms = sum(row["rate"] * (row["mean_ms"] or 0.0) for row in rows)
    return {
        "type": "tick",
        "unix_ms": round(new.unix_ms),
        "window_s": round(seconds, 2),
        "total": {**total, "mean_ms": round(total_ms / total["rate"], 2) if total["rate"] else None},
        "graphs": sorted(rows, key=lambda row: -row["rate"]),
        "looked_at": seen,
    }


def _steps(steps: dict[str, pb.ObservedStep], seconds: float) -> dict[str, dict[str, Any]]:
    """Rows by path, from what was counted in so many seconds."""
    runs = {
        path: sum(step.bucket) + sum(count for name, count in step.failure.items() if name != "SKIPPED")
        for path, step in steps.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for path, step in steps.items():
        failures = {name: round(count / seconds, 2) for name, count in step.failure.items() if count}
        skipped = failures.pop("SKIPPED", 0.0)
        beside = [other for other in steps if steps[other].node == step.node and not steps[other].is_aside]
        num_runs, num_beside = runs[path], sum(runs[other] for other in beside)
        has_share = step.kind in _SHARING and path in beside and num_beside > 0
        num_behind = runs[beside[beside.index(path) + 1]] if path in beside[:-1] else 0
        is_accepting = step.kind == "cascade" and path in beside and num_runs > 0
        found[path] = {
            "rate": round(sum(step.bucket) / seconds, 2),
            "errors": round(sum(failures.values()), 2),
            "skipped": skipped,
            **_quantiles(step.bucket),
            "share": round(num_runs / num_beside, 4) if has_share else None,
            "accepted": round(max(1 - num_behind / num_runs, 0.0), 4) if is_accepting else None,
            "failures": failures,
            "events": {name: round(count / seconds, 2) for name, count in step.event.items() if count},
        }
    return found


def _merge(known: dict[Any, Any], key: Any, one: Any) -> None:
    known[key] = _combined(known[key], one, add) if key in known else one


def _combined(one: Any, other: Any, how: Callable[[int, int], int]) -> Any:
    """Counts of two messages of one kind, added or subtracted; none falls below 0, as where a process has ended."""
    result = type(one)()
    result.CopyFrom(one)
    if isinstance(one, pb.ObservedGraph):
        for name in _COUNTS:
            setattr(result, name, max(how(getattr(one, name), getattr(other, name)), 0))
    else:
        for mine, others in ((result.failure, other.failure), (result.event, other.event)):
            for name in {*mine, *others}:
                mine[name] = max(how(mine[name], others[name]), 0)
    result.bucket[:] = [max(how(a, b), 0) for a, b in zip_longest(one.bucket, other.bucket, fillvalue=0)]
    return result


def _quantiles(counts: Iterable[int]) -> dict[str, float | None]:
    """Half and 99 % of the latencies in these buckets."""
    cumulative = dict(zip((*LATENCY_BUCKETS_S, math.inf), accumulate(counts), strict=False))
    found = quantiles_ms(cumulative, (0.5, 0.99))
    return {name: value and round(value, 2) for name, value in zip(("p50_ms", "p99_ms"), found, strict=True)}
