"""Token counts and biases of one sequence for penalties, updated per token: ``PenaltyRow``."""

from array import array
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from weft.llm.sampling_params import SamplingParams

_NEITHER = -1
_FORBIDDEN = float("-inf")


class PenaltyRow:
    """Unique tokens of prompt, output and biases of one sequence; appending costs O(1).

    Args:
        params: Penalties, biases and ``min_tokens`` of the sequence.
        tokens: All its tokens so far.
        num_prompt: Length of the prompt.
        stop_ids: Stop tokens, suppressed until the sequence has ``min_tokens`` new tokens.
        unique_prompt_ids: Tokens of the prompt, each once, int32; None: to be found.

    Attributes:
        tokens: Unique token ids, int32.
        counts: Occurrences of each in the output; 0: in the prompt only; -1: in neither.
        biases: Added to the logit of each, float32; minus infinity while suppressed.
    """

    __slots__ = ("_forbidden", "_keeps_counts", "_num_to_allow", "_places", "biases", "counts", "tokens")

    def __init__(
        self,
        params: SamplingParams,
        tokens: "array[int]",
        num_prompt: int,
        stop_ids: Iterable[int],
        unique_prompt_ids: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self._keeps_counts = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        self.tokens = array("i")
        if self._keeps_counts and params.repetition_penalty != 1.0:
            unique = np.unique(tokens[:num_prompt]) if unique_prompt_ids is None else unique_prompt_ids
            self.tokens.frombytes(unique.tobytes())
        # 30,000 tokens take 2 ms at once, 12 ms one by one.
        self.counts = array("i", bytes(self.tokens.itemsize * len(self.tokens)))
        self.biases = array("f", bytes(self.tokens.itemsize * len(self.tokens)))
        self._places = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        for token, bias in params.logit_bias:
            self.biases[self._place(token)] = bias
        biases = dict(params.logit_bias)
        self._num_to_allow = params.min_tokens
        self._forbidden = [(self._place(token), biases.get(token, 0.0)) for token in stop_ids if params.min_tokens]
        for place, _ in self._forbidden:
            self.biases[place] = _FORBIDDEN
        for token in tokens[num_prompt:]:
            self.append(token)

    def append(self, token: int) -> None:
        """Count ``token`` as the next output token; -1: a token that is not known."""
        if self._keeps_counts and token >= 0:
            place = self._places.get(token)
            if place is None:
                place = self._place(token)
            count = self.counts[place]
            self.counts[place] = count + 1 if count > 0 else 1
        if self._num_to_allow:
            self._num_to_allow -= 1
            if not self._num_to_allow:
                for place, bias in self._forbidden:
                    self.biases[place] = bias

    def rows(self, drafts: Iterable[int]) -> Iterator[tuple["array[int]", "array[int]", "array[float]"]]:
        """``tokens``, ``counts`` and ``biases`` before the first of ``drafts`` and after each; unchanged at the end.

        The arrays of a row are valid until the next one. An unknown draft, -1, is not counted.
        """
        yield self.tokens, self.counts, self.biases
        num_places, num_to_allow, undo = len(self.tokens), self._num_to_allow, []
        for draft in drafts:
            place = self._places.get(draft, num_places)
            if place < num_places:
                undo.append((place, self.counts[place]))
            self.append(draft)
            yield self.tokens, self.counts, self.biases
        for place, count in reversed(undo):
            self.counts[place] = count
        for token in self.tokens[num_places:]:
            del self._places[token]
        del self.tokens[num_places:], self.counts[num_places:], self.biases[num_places:]
        if num_to_allow and not self._num_to_allow:
            for place, _ in self._forbidden:
                self.biases[place] = _FORBIDDEN
        self._num_to_allow = num_to_allow

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(_NEITHER)
            self.biases.append(0.0)
        return place
