"""The rule of lossless speculation: a draft is accepted iff it equals the token that the target samples there."""

from collections.abc import Sequence as Seq
from typing import Protocol

from weft.llm.scheduler.sequence import Sequence

#: Token id of a draft that a proposer on the device fills in.
UNKNOWN_TOKEN = -1


def num_accepted(drafts: Seq[int], samples: Seq[int]) -> int:
    """How many leading ``drafts`` equal the tokens sampled at their positions.

    The noise of sampling is keyed by seed, position and token, so a sampled token does not depend on drafts behind its
    position, and the output is the same with any drafts or none, at any temperature.

    Args:
        drafts: Guessed tokens.
        samples: Token sampled at the position of each draft; there may be more.

    Source:
        Gumbel-max coupling as in https://arxiv.org/abs/2408.07978, with the draft's noise equal to the target's.
    """
    count = 0
    for draft, sample in zip(drafts, samples, strict=False):
        if draft != sample:
            break
        count += 1
    return count


class DraftSource(Protocol):
    """Decides which sequences of a step get drafts, and which ones."""

    def propose(self, seqs: Seq[Sequence], num_rows: int, num_left: int) -> list[Sequence]:
        """Set ``drafts`` of some of ``seqs``.

        Args:
            seqs: Sequences with one token to compute in this step, in any order. Must not be changed.
            num_rows: Tokens that the step computes without drafts.
            num_left: Most drafts of all of them together.

        Returns:
            Those with drafts, the first in service first. The scheduler may drop the last drafts of each, or all.
        """

    def observe(self, seq: Sequence, samples: Seq[int], count: int) -> None:
        """``seq.drafts`` were computed, ``samples`` sampled (one more than drafts), and ``count`` drafts accepted."""
