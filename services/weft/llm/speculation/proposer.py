"""Interface of proposers that work on the host, from tokens alone: ``Proposer``."""

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol


class Proposer(Protocol):
    """Guesses the next tokens of one sequence, on the engine's thread. One object per sequence that runs.

    The guesses (drafts) become further tokens of the sequence in the same step. The target samples after each of them,
    and a draft counts iff it equals the token sampled at its position, so a guess can be wrong but never changes what
    comes out. Calls come in this order, at most once each in a step: ``propose``, the step, ``observe``. Steps in which
    the sequence gets no drafts call neither; the next ``propose`` then finds several new tokens.

    The engine waits while a call runs, for every sequence. Work must be bounded: amortised O(1) per new token, and
    O(``num_drafts``) per call with a small constant (a few microseconds). So must memory: at most a few bytes per
    token. An exception fails the engine, as any defect in the scheduler does.
    """

    def propose(self, tokens: "array[int]", num_drafts: int) -> Sequence[int]:
        """Guesses of the tokens that follow ``tokens``.

        Args:
            tokens: Prompt and output so far, int32. Must be neither changed nor kept, and no view of it may outlive
                the call. It is that of the last call with new tokens appended: earlier tokens never change, whatever
                happened to drafts, and also after a preemption.
            num_drafts: Most guesses that the step has room for, at least 1.

        Returns:
            0 to ``num_drafts`` token ids of the target's vocabulary, in order. Of these the first may be used alone.
        """

    def observe(self, drafts: Sequence[int], samples: Sequence[int]) -> None:
        """What the target sampled at the drafts of the last ``propose`` that the step computed.

        Args:
            drafts: The drafts computed, the first ones proposed; at least one.
            samples: ``len(drafts) + 1`` tokens. ``samples[0]`` follows the tokens of the last ``propose``;
                ``samples[i]`` follows these and ``drafts[:i]``. Up to and including the first that differs from its
                draft they are output; the rest are guesses of a Jacobi iteration.
        """


#: Makes the proposer of a new sequence, given its longest length in tokens.
ProposerFactory = Callable[[int], Proposer]
