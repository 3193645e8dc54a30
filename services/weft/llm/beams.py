"""Beam search: which continuations of a prompt go on, and which have ended. ``BeamSearch``."""

from collections.abc import Collection
from itertools import chain
from typing import NamedTuple

from weft.llm.request import Delta, EngineRequest, SamplingParams, StepLogprobs, TokenLogprobs


class Beam(NamedTuple):
    """A continuation.

    Attributes:
        logprob: Of all its tokens together.
        logprobs: Of each of them.
        finish_reason: "stop" or "length"; "" if it goes on.
    """

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str = ""


class BeamSearch:
    """One search of width ``params.n``, token by token; ends as that of transformers does.

    Attributes:
        running: Continuations to extend by a token, at most ``n``, likeliest first.
        ended: Those that have ended, at most ``n``, best first.
        num_candidates: The likeliest tokens that must be known behind each of ``running``.
    """

    def __init__(self, params: SamplingParams, stop_ids: Collection[int], max_tokens: int) -> None:
        self._params = params
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._rows: dict[int, TokenLogprobs] = {}
        self.running = [Beam()]
        self.ended: list[Beam] = []
        self.num_candidates = params.n * max(2, 1 + len(stop_ids))

    def add(self, index: int, row: TokenLogprobs) -> bool:
        """Take the likeliest tokens behind ``running[index]``; true if it was the last, and all are extended."""
        self._rows[index] = row
        if len(self._rows) < len(self.running):
            return False
        rows, self._rows = self._rows, {}
        found = chain.from_iterable(self._extended(beam, rows[index]) for index, beam in enumerate(self.running))
        likeliest = sorted(found, key=lambda beam: -beam.logprob)[: self.num_candidates]
        width = self._params.n
        self.running = [beam for beam in likeliest if not beam.finish_reason][:width]
        ended = (beam for beam in likeliest[:width] if beam.finish_reason)
        self.ended = sorted((*self.ended, *ended), key=lambda beam: -self._score(beam, len(beam.token_ids)))[:width]
        if len(self.ended) == width and not self._may_improve():
            self.running = []
        return True

    def deltas(self, request: EngineRequest, num_cached: int, scores: list[StepLogprobs] | None) -> list[Delta]:
        """All of a search that has ended."""
        has_logprobs, last = self._params.logprobs is not None, len(self.ended) - 1
        return [
            Delta(
                *(request, index, [*beam.token_ids], [*beam.logprobs] if has_logprobs else None, beam.finish_reason),
                is_last=index == last,
                num_cached_tokens=num_cached,
                prompt_logprobs=None if index else scores,
            )
            for index, beam in enumerate(self.ended)
        ]

    def _extended(self, beam: Beam, row: TokenLogprobs) -> list[Beam]:
        length = len(beam.token_ids) + 1
        reason = "length" if length >= self._max_tokens else ""
        top_ids, top, num_top = row.top_ids, row.top_logprobs, self._params.logprobs or 0
        return [
            Beam(
                (*beam.token_ids, token),
                beam.logprob + logprob,
                (*beam.logprobs, TokenLogprobs(logprob, top_ids[:num_top], top[:num_top])),
                "stop" if token in self._stop_ids else reason,
            )
            for token, logprob in zip(top_ids, top, strict=True)
        ]

    def _may_improve(self) -> bool:
        """Whether the likeliest of ``running`` may become better than the worst that has ended."""
        params = self._params
        if params.early_stopping is True or not self.running:
            return False
        first, last = self.running[0], self.ended[-1]
        is_exact = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if is_exact else len(first.token_ids)
        return self._score(first, length) > self._score(last, len(last.token_ids))

    def _score(self, beam: Beam, length: int) -> float:
        return float(beam.logprob / length**self._params.length_penalty)
