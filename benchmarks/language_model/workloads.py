"""Seeded workloads: prompts of random tokens, answers of given lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

#: Prompts of mixed length, shortest and longest; answers are exponential, with this mean and this end.
PROMPT_LENS = (16, 64)
MEAN_ANSWER, LONGEST_ANSWER = 48, 256
LONGEST_TEXT = PROMPT_LENS[1] + LONGEST_ANSWER
#: Mean lengths of the prompts and answers of ShareGPT, in tokens of Llama 3.
_CHAT_LENS = (215, 198)
_LONGEST_CHAT = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request.

    Attributes:
        prompt: Token ids, int32.
        num_tokens: Of the answer; nothing ends it sooner.
        level: Priority level, smaller is served sooner.
        at_s: When it comes, in seconds from the start of an open loop.
    """

    prompt: npt.NDArray[np.int32]
    num_tokens: int
    level: int = 0
    at_s: float = 0.0


def mixed(num_jobs: int, vocab_size: int, seed: int = 0) -> list[Job]:
    """Prompts of ``PROMPT_LENS``, evenly; answers exponential with mean ``MEAN_ANSWER``, cut at ``LONGEST_ANSWER``."""
    rng = np.random.default_rng(seed)
    prompt_lens = rng.integers(PROMPT_LENS[0], PROMPT_LENS[1] + 1, num_jobs)
    answers = np.clip(np.ceil(rng.exponential(MEAN_ANSWER, num_jobs)), 1, LONGEST_ANSWER).astype(int)
    return [
        Job(_tokens(rng, vocab_size, length), answer)
        for length, answer in zip(prompt_lens.tolist(), answers.tolist(), strict=True)
    ]


def chatting(num_jobs: int, vocab_size: int, seed: int = 0) -> list[Job]:
    """Prompts and answers as long as those of a chat on average, both exponential."""
    rng = np.random.default_rng(seed)
    prompt_lens, answers = (
        np.clip(np.ceil(rng.exponential(mean, num_jobs)), 1, _LONGEST_CHAT).astype(int) for mean in _CHAT_LENS
    )
    return [
        Job(_tokens(rng, vocab_size, length), answer)
        for length, answer in zip(prompt_lens.tolist(), answers.tolist(), strict=True)
    ]


def with_prefix(num_jobs: int, vocab_size: int, num_shared: int, num_own: int, num_tokens: int) -> list[Job]:
    """Prompts that begin with the same ``num_shared`` tokens and go on with ``num_own`` of their own."""
    rng = np.random.default_rng(0)
    shared = _tokens(rng, vocab_size, num_shared)
    return [Job(np.concatenate([shared, _tokens(rng, vocab_size, num_own)]), num_tokens) for _ in range(num_jobs)]


def alike(num_jobs: int, vocab_size: int, prompt_len: int, num_tokens: int, seed: int = 0) -> list[Job]:
    """Different prompts of one length, and answers of one length."""
    rng = np.random.default_rng(seed)
    return [Job(_tokens(rng, vocab_size, prompt_len), num_tokens) for _ in range(num_jobs)]


def arriving(jobs: Sequence[Job], rate_per_s: float, seed: int = 0) -> list[Job]:
    """The jobs as a Poisson process of that rate."""
    times_s = np.random.default_rng(seed).exponential(1 / rate_per_s, len(jobs)).cumsum()
    return [replace(job, at_s=at_s) for job, at_s in zip(jobs, times_s.tolist(), strict=True)]


def with_levels(jobs: Sequence[Job], share_high: float, high: int, low: int, seed: int = 0) -> list[Job]:
    """The jobs, of which that share, at least one, has level ``high``, drawn at random, and the others ``low``."""
    num_high = max(round(share_high * len(jobs)), 1)
    chosen = set(np.random.default_rng(seed).permutation(len(jobs))[:num_high].tolist())
    return [replace(job, level=high if number in chosen else low) for number, job in enumerate(jobs)]


def _tokens(rng: np.random.Generator, vocab_size: int, count: int) -> npt.NDArray[np.int32]:
    return rng.integers(vocab_size, size=count, dtype=np.int32)
