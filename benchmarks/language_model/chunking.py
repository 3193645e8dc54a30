"""C4: what a long prompt does to those who are in the middle of their answers, in chunks and whole."""

from typing import NamedTuple

import numpy as np

from benchmarks.language_model.drive import Answer, Driver
from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.shapes import Model
from benchmarks.language_model.sizes import Sizes
from benchmarks.language_model.workloads import Job, alike

_CASE = "C4"
_CHUNK = 64
_PROMPT_LEN = 32
#: Tokens that every decoder has before the long prompt comes, and that it goes on for after.
_NUM_BEFORE, _NUM_AFTER = 8, 16


class _Round(NamedTuple):
    """Milliseconds.

    Attributes:
        itl_p99: 99th percentile of the decoders' times between tokens while the long prompt was computed.
        itl_max: The longest of them.
        ttft: Of the long prompt.
    """

    itl_p99: float
    itl_max: float
    ttft: float


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """Times between tokens and of the prompt, both ways."""
    chunks = {f"chunks of {_CHUNK}": _CHUNK, "whole": sizes.long_prompt + sizes.decoders}
    rounds: dict[str, list[_Round]] = {name: [] for name in chunks}
    for number in range(sizes.num_rounds):
        for name, chunk in chunks.items():
            rounds[name].append(_round(model, sizes, chunk, number))
    chunked, whole = rounds.values()
    ratios = [b.itl_p99 / a.itl_p99 for a, b in zip(chunked, whole, strict=True)]
    count = f"{sizes.decoders} decoders, a prompt of {sizes.long_prompt}"
    figures = []
    for name, got in rounds.items():
        figures += [
            figure(_CASE, f"p99 between tokens, {count}, {name}", [one.itl_p99 for one in got], "ms"),
            figure(_CASE, f"  longest, {name}", [one.itl_max for one in got], "ms"),
            figure(_CASE, f"  first token of the prompt, {name}", [one.ttft for one in got], "ms"),
        ]
    return [*figures, figure(_CASE, "p99, whole over chunks", ratios, "x", target=Target(">=", 5))]


def _round(model: Model, sizes: Sizes, chunk: int, seed: int) -> _Round:
    config = model.engine_config(
        max_num_seqs=sizes.decoders + 1,
        max_num_batched_tokens=chunk + sizes.decoders,
        long_prefill_token_threshold=chunk,
    )
    # The decoders go on until well after the prompt, whichever way; how long that takes is known in steps only.
    num_steps = _NUM_BEFORE + -(-sizes.long_prompt // min(chunk, sizes.long_prompt)) + _NUM_AFTER
    driver = Driver(model, config)
    (prompt,) = alike(1, model.shape.vocab_size, sizes.long_prompt, 1, seed)
    late: list[Answer] = []
    num_ready = 0

    def start_prompt(answer: Answer) -> None:
        nonlocal num_ready
        num_ready += len(answer.token_ids) == _NUM_BEFORE
        if num_ready == sizes.decoders and not late:
            late.append(driver.submit(prompt))

    jobs = [
        Job(job.prompt, num_steps) for job in alike(sizes.decoders, model.shape.vocab_size, _PROMPT_LEN, 1, seed + 1)
    ]
    decoders = [driver.submit(job, on_delta=start_prompt) for job in jobs]
    with driver.measured(decoders, sizes.decoders + 1):
        pass
    came_ns, done_ns = late[0].start_ns, late[0].token_ns[0]
    gaps_ms = [
        (after - before) / 1e6
        for answer in decoders
        for before, after in zip(answer.token_ns, answer.token_ns[1:], strict=False)
        if after > came_ns and before < done_ns
    ]
    return _Round(float(np.percentile(gaps_ms, 99)), max(gaps_ms), late[0].ttft_s * 1e3)
