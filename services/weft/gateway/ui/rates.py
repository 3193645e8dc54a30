"""Rates, latencies and shares from two answers of the router's ``Observe``."""

import math
from collections.abc import Callable, Collection
from itertools import accumulate, zip_longest
from operator import add, sub
from typing import Any

from weft.base.statistics import LATENCY_BUCKETS_S
from weft.gateway.v2.routes import to_json
from weft.v2.client.frames import quantiles_ms
from weft_protos import graph_service_pb2 as pb

#: Kinds of nodes whose steps share the requests.
_SHARING = ("splitter", "switch", "cascade")
_NOTHING = pb.Observed()

Json = dict[str, Any]


class Sample:
    """What was told at one time, the counters of all processes of the router together; ``at_s`` is of any clock."""

    def __init__(self, seen: pb.ObserveResponse, at_s: float) -> None:
        self.at_s, self.seen = at_s, seen
        self.counts: dict[tuple[str, str, str], pb.Observed] = {}
        for one in seen.count:
            key = one.graph, one.version, one.path
            self.counts[key] = _combined(self.counts[key], one, add) if key in self.counts else one
        arms = sorted(seen.arm, key=lambda one: one.arm.num_pulls)
        self.arms = {(one.graph, one.arm.node, one.arm.step): one.arm for one in arms}


def tick_of(old: Sample, new: Sample, looked_at: Collection[str]) -> Json:
    """What has happened between two samples; a graph without traffic is told only if it is looked at."""
    seconds = max(new.at_s - old.at_s, 1e-3)
    deltas = {
        key: _combined(one, old.counts.get(key, _NOTHING), sub)
        for key, one in new.counts.items()
        if not one.is_model and (one.num_ok or one.failure or one.num_inflight or one.graph in looked_at)
    }
    graphs = [delta for delta in deltas.values() if not delta.path]
    rows = [_row(delta, seconds) for delta in graphs]
    seen = []
    for row, graph in zip(rows, graphs, strict=True):
        if graph.graph in looked_at:
            key = graph.graph, graph.version
            steps = [one for one in deltas.values() if one.path and (one.graph, one.version) == key]
            told = {step.path: {**_details(step, seconds), **_shares(step, steps)} for step in steps}
            arms = [to_json(arm) for (name, *_), arm in new.arms.items() if name == graph.graph]
            seen.append({**row, **_details(graph, seconds), "steps": told, "arms": arms})
    total = {name: round(sum(row[name] for row in rows), 2) for name in ("rate", "errors", "inflight")}
    total_ms = sum(row["rate"] * (row["mean_ms"] or 0.0) for row in rows)
    active = [row for row in rows if row["rate"] or row["errors"] or row["inflight"]]
    return {
        "type": "tick",
        "unix_ms": round(new.seen.unix_ms),
        "window_s": round(seconds, 2),
        "total": {**total, "mean_ms": round(total_ms / total["rate"], 2) if total["rate"] else None},
        "graphs": sorted(active, key=lambda row: -row["rate"]),
        "looked_at": seen,
    }


def _row(delta: pb.Observed, seconds: float) -> Json:
    num_failed = sum(delta.failure.values())
    return {
        "name": delta.graph,
        "version": delta.version,
        "rate": round((delta.num_ok + num_failed) / seconds, 2),
        "errors": round(num_failed / seconds, 2),
        "mean_ms": round(delta.total_ns / delta.num_ok / 1e6, 2) if delta.num_ok else None,
        "inflight": delta.num_inflight,
    }


def _details(delta: pb.Observed, seconds: float) -> Json:
    failures = {name: round(count / seconds, 2) for name, count in delta.failure.items() if count}
    skipped = failures.pop("SKIPPED", 0.0)
    cumulative = dict(zip((*LATENCY_BUCKETS_S, math.inf), accumulate(delta.bucket), strict=False))
    p50_ms, p99_ms = (value and round(value, 2) for value in quantiles_ms(cumulative, (0.5, 0.99)))
    return {
        "rate": round(delta.num_ok / seconds + sum(failures.values()), 2),
        "skipped": skipped,
        "errors": round(sum(failures.values()), 2),
        "failures": failures,
        "events": {name: round(count / seconds, 2) for name, count in delta.event.items() if count},
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
    }


def _shares(step: pb.Observed, steps: Collection[pb.Observed]) -> Json:
    """Its share among the steps of its node, and the share of its runs after which a cascade ended."""
    beside = [one for one in steps if one.node == step.node and not one.is_aside]
    if step.is_aside or step.kind not in _SHARING:
        return {"share": None, "accepted": None}
    runs = [one.num_ok + sum(count for name, count in one.failure.items() if name != "SKIPPED") for one in beside]
    own = beside.index(step)
    num_after = [*runs, 0][own + 1]
    is_accepting = step.kind == "cascade" and runs[own]
    return {
        "share": round(runs[own] / sum(runs), 4) if sum(runs) else None,
        "accepted": round(max(1 - num_after / runs[own], 0.0), 4) if is_accepting else None,
    }


def _combined(one: pb.Observed, other: pb.Observed, how: Callable[[int, int], int]) -> pb.Observed:
    """Counts added or subtracted; none falls below 0, as where a process has ended."""
    result = pb.Observed()
    result.CopyFrom(one)
    result.num_ok, result.total_ns = max(how(one.num_ok, other.num_ok), 0), max(how(one.total_ns, other.total_ns), 0)
    for mine, others in ((result.failure, other.failure), (result.event, other.event)):
        for name in {*mine, *others}:
            mine[name] = max(how(mine[name], others.get(name, 0)), 0)
    result.bucket[:] = [max(how(a, b), 0) for a, b in zip_longest(one.bucket, other.bucket, fillvalue=0)]
    if how is add:
        result.num_inflight += other.num_inflight
    return result
