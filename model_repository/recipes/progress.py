"""How far a training is: a bar on a terminal, else a line now and then."""

import sys
from collections.abc import Iterator

from tqdm import trange

_NUM_LINES = 10


def steps(num_steps: int, what: str) -> Iterator[int]:
    """0 to ``num_steps`` - 1; the progress goes to standard error.

    Args:
        num_steps: Steps of about the same length.
        what: What is done.
    """
    if sys.stderr.isatty():
        yield from trange(num_steps, desc=what, unit="step", leave=False)
        return
    for step in range(num_steps):
        if step * _NUM_LINES // num_steps > (step - 1) * _NUM_LINES // num_steps:
            print(f"{what}: {step * 100 // num_steps} %", file=sys.stderr, flush=True)
        yield step
