"""``python -m benchmarks.jobs``: kill and measure batch jobs and streams, print one table, write JSON."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks import machine
from benchmarks.jobs import kills, online, streams, throughput
from benchmarks.jobs.mesh import ROOT
from benchmarks.language_model.figures import Figure, render
from benchmarks.report import machine_lines, write_json

#: Cases by name, whole and quick.
CASES: dict[str, tuple[Callable[[], list[Figure]], Callable[[], list[Figure]]]] = {
    "kills": (lambda: kills.measure(100_000, 5_000, 50), lambda: kills.measure(4_000, 200, 6)),
    "online": (lambda: online.measure(5, 8.0), lambda: online.measure(1, 4.0)),
    "throughput": (lambda: throughput.measure(100_000, 400), lambda: throughput.measure(2_000, 60)),
    "streams": (lambda: streams.measure(200_000, 3), lambda: streams.measure(5_000, 1)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured and no target missed; the targets of ``--quick`` do not count."""
    parser = argparse.ArgumentParser(prog="benchmarks.jobs", description="Batch jobs and streams, killed and measured.")
    parser.add_argument("--only", default=",".join(CASES), metavar="CASES", help=f"some of {','.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="less of everything; the figures mean little")
    options = parser.parse_args(argv)
    names = options.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    described = machine.describe()
    figures: list[Figure] = []
    for name in names:
        start_s = time.perf_counter()
        figures += CASES[name][options.quick]()
        print(f"{name}: {time.perf_counter() - start_s:.0f} s", file=sys.stderr)
    print("\n".join([*machine_lines(described), "", render(figures)]))
    if options.quick:
        return 0
    path = write_json(ROOT / "benchmarks" / "results", figures, described, prefix="jobs-")
    print(f"\nwrote {path}")
    return int(any(one.is_met is False for one in figures))


if __name__ == "__main__":
    sys.exit(main())
