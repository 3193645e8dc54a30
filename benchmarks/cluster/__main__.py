"""Command line: ``python -m benchmarks.cluster policies|ratios|published``.

``policies``: the balancing rules of the router on replicas that compute and decode, and sessions with common system
prompts. ``ratios``: so many replicas divided into prefill and decode, and all of them doing both, at one rate.
``published``: figures of others beside those of the simulation.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cluster import published
from benchmarks.cluster.costs import SHAPES, StepCosts, costs_of
from benchmarks.cluster.requests import copies, drawn_lengths, sessions
from benchmarks.cluster.simulation import CHOICES, Cluster, Figures, Run
from benchmarks.report import table

_HEADER = ["", "1/s", "TTFT p50 ms", "p99", "TPOT p90 ms", "gap p99 ms", "hits", "busy", "busiest", "CPU s"]


def _line(name: str, figures: Figures, cpu_s: float) -> list[str]:
    return [
        name,
        f"{figures.rate_per_s:.0f}",
        f"{figures.ttft_p50_ms:.0f}",
        f"{figures.ttft_p99_ms:.0f}",
        f"{figures.tpot_p90_ms:.1f}",
        f"{figures.gap_p99_ms:.0f}",
        f"{figures.hit_rate:.0%}",
        ", ".join(f"{share:.0%}" for share in figures.busy),
        f"{figures.imbalance:.2f}",
        f"{cpu_s:.1f}",
    ]


def policies(options: argparse.Namespace) -> str:
    """A line for each rule."""
    rate = options.rate_per_replica * options.replicas
    requests = sessions(rate, options.requests, num_prompts=256, system=2048, pause_s=5.0, seed=options.seed)
    lines = [_HEADER]
    for name in options.policy or ["round_robin", "least_outstanding", *(["prefix"] if "prefix" in CHOICES else ())]:
        begin_s = time.process_time()
        cluster = Cluster(_costs(options), replicas=options.replicas, policy=name, routers=options.routers)
        lines.append(_line(name, Run(cluster, copies(requests)).run(), time.process_time() - begin_s))
    return table(lines, left_columns=(0,))


def ratios(options: argparse.Namespace) -> str:
    """A line for each division of the replicas."""
    rate = options.rate_per_replica * options.replicas
    requests = drawn_lengths(rate, options.requests, options.prompt, options.output, options.seed)
    made = Cluster(_costs(options), routers=options.routers)
    ways = {"together": replace(made, replicas=options.replicas)}
    for tenths in range(2, 9):
        prefill = max(options.replicas * tenths // 10, 1)
        decode = options.replicas - prefill
        ways[f"{prefill} prefill, {decode} decode"] = replace(made, prefill=prefill, decode=decode)
    lines = [_HEADER]
    for name, cluster in ways.items():
        begin_s = time.process_time()
        lines.append(_line(name, Run(cluster, copies(requests)).run(), time.process_time() - begin_s))
    return table(lines, left_columns=(0,))


def compare(options: argparse.Namespace) -> str:
    """A line for each published figure."""
    rows = [*published.distserve(), *published.sglang()]
    rows += published.mooncake(options.traces) if options.traces else []
    return table(
        [["", "published", "here"], *([r.what + " (fitted)" * r.is_given, r.published, r.ours] for r in rows)],
        left_columns=(0,),
    )


def _costs(options: argparse.Namespace) -> StepCosts:
    return costs_of(SHAPES[options.model], options.device, options.devices)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the table is printed."""
    parser = argparse.ArgumentParser(prog="benchmarks.cluster", description=__doc__)
    parser.add_argument("what", choices=("policies", "ratios", "published"))
    parser.add_argument("--replicas", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=20_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--rate-per-replica", type=float, default=3.0, metavar="N", help="1/s; default: %(default)s")
    parser.add_argument("--routers", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--policy", nargs="+", choices=CHOICES, help="of `policies`")
    parser.add_argument("--prompt", type=int, default=1500, metavar="TOKENS", help="mean, of `ratios`")
    parser.add_argument("--output", type=int, default=250, metavar="TOKENS", help="mean, of `ratios`")
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="H100", help="of weft plan's table")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="of a replica")
    parser.add_argument("--traces", type=Path, help="folder of Mooncake's traces, of `published`")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print({"policies": policies, "ratios": ratios, "published": compare}[options.what](options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
