"""``python -m benchmarks.language_model``: measure the language-model engine, print one table, write JSON."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.language_model import (
    adapters,
    cancelling,
    chunking,
    continuous,
    goodput,
    offloading,
    prefixes,
    priorities,
    scheduler_alone,
    serving,
    speculation,
)
from benchmarks.language_model.drive import Driver, run_burst
from benchmarks.language_model.figures import Figure, render
from benchmarks.language_model.shapes import SHAPES, Model, make_model
from benchmarks.language_model.sizes import FULL, QUICK, Sizes
from benchmarks.language_model.workloads import mixed
from benchmarks.report import machine_lines, write_json

ROOT = Path(__file__).resolve().parents[2]
#: Requests before the first case: torch is slow the first time that it sees a shape.
_NUM_WARM = 16

CASES: dict[str, Callable[[Model, Sizes], list[Figure]]] = {
    "C1": continuous.measure,
    "C2": prefixes.measure,
    "C3": speculation.measure_ngram,
    "C4": chunking.measure,
    "C5": priorities.measure,
    "C6": cancelling.measure,
    "C7": scheduler_alone.measure,
    "C8": goodput.measure,
    "tier": offloading.measure,
    "lora": adapters.measure,
    "serving": serving.measure,
    "speculation": speculation.measure,
}


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured and no target missed; the targets of ``--quick`` do not count."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.language_model", description="What the language-model engine does, on one thread of a CPU."
    )
    parser.add_argument("--only", default=",".join(CASES), metavar="CASES", help=f"some of {','.join(CASES)}")
    parser.add_argument("--shape", default="toy", choices=SHAPES, help="of the model; default: toy")
    parser.add_argument("--quick", action="store_true", help="less of everything; the figures mean little")
    options = parser.parse_args(argv)
    names = options.only.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    model = make_model(options.shape)
    described = machine.describe() | {"model": f"{model.shape.name}, {model.num_parameters / 1e6:.2f} M parameters"}
    run_burst(Driver(model, model.engine_config()), mixed(_NUM_WARM, model.shape.vocab_size))
    figures: list[Figure] = []
    for name in names:
        start_s = time.perf_counter()
        figures += CASES[name](model, QUICK if options.quick else FULL)
        print(f"{name}: {time.perf_counter() - start_s:.0f} s", file=sys.stderr)
    print("\n".join([*machine_lines(described), f"Model: {described['model']}, one thread", "", render(figures)]))
    if options.quick:
        return 0
    path = write_json(ROOT / "benchmarks" / "results", figures, described, prefix="language-model-")
    print(f"\nwrote {path}")
    return int(any(one.is_met is False for one in figures))


if __name__ == "__main__":
    sys.exit(main())
