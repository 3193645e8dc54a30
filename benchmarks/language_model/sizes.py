"""How much the cases do."""

from typing import NamedTuple


class Sizes(NamedTuple):
    """Numbers of requests and tokens.

    Attributes:
        num_rounds: In which the compared ways take turns; figures are medians.
        num_slots: Sequences that run at a time, in all cases but C4.
        num_step_tokens: Tokens of a step, likewise.
        mixed_jobs: C1.
        baseline_rounds: Rounds of C1 in which ``transformers`` takes part; it is slow.
        prefix_jobs: C2.
        prefix_len: C2: tokens that the prompts share.
        decoders: C4.
        long_prompt: C4: tokens of the prompt that comes in between.
        open_jobs: C5 and C8, each run.
        alone_jobs: Likewise, one after the other, to know what an engine without load does.
        cancel_jobs: C6.
        scheduler_steps: C7, each round.
        serving_jobs: Of the row over gRPC.
        speculated_rounds: Of speculation.
        speculated_tokens: Of each answer, C3 and speculation.
        speculated_batches: Requests at a time, likewise.
        head_steps: Of the training of heads for ``writer``; half as many for the permutation model.
        head_tokens: Of the text for that.
    """

    num_rounds: int = 3
    num_slots: int = 16
    num_step_tokens: int = 128
    mixed_jobs: int = 192
    baseline_rounds: int = 1
    prefix_jobs: int = 32
    prefix_len: int = 512
    decoders: int = 12
    long_prompt: int = 1500
    open_jobs: int = 144
    alone_jobs: int = 16
    cancel_jobs: int = 200
    scheduler_steps: int = 1000
    serving_jobs: int = 64
    speculated_rounds: int = 6
    speculated_tokens: int = 128
    speculated_batches: tuple[int, ...] = (1, 8, 16)
    head_steps: int = 200
    head_tokens: int = 65536


FULL = Sizes()
QUICK = Sizes(
    num_rounds=1, mixed_jobs=32, prefix_jobs=8, prefix_len=128, long_prompt=400, open_jobs=32, cancel_jobs=40,
    scheduler_steps=100, serving_jobs=16, speculated_rounds=1, speculated_tokens=80, head_steps=20,
    head_tokens=4096,
)  # fmt: skip
