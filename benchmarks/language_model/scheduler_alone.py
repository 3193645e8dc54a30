"""C7: what a step costs the scheduler, without a model; ``benchmarks.llm_scheduler`` has the whole table."""

from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.shapes import Model
from benchmarks.language_model.sizes import Sizes
from benchmarks.llm_scheduler import CASES
from benchmarks.llm_scheduler import measure as measure_scheduler

_CASE = "C7"
_NUM_WARM = 100


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """Medians over the steps of each round, with 256 sequences that run and 1000 that wait."""
    del model  # the scheduler knows none
    (case, *_) = CASES
    rows = [measure_scheduler(case, 1, _NUM_WARM, sizes.scheduler_steps) for _ in range(sizes.num_rounds)]
    return [
        figure(
            _CASE, f"step of the scheduler, {case.name}", [row.step_us for row in rows], "us", target=Target("<", 500)
        ),
        figure(_CASE, "  p99", [row.step_p99_us for row in rows], "us"),
    ]
