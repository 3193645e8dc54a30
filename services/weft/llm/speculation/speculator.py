"""Drafts of an engine's sequences: who gets how many, and from which proposer. ``Speculator``."""

from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import cast

from weft.llm.scheduler.acceptance import UNKNOWN_TOKEN
from weft.llm.scheduler.sequence import Sequence
from weft.llm.speculation.depth import Acceptance, AdaptiveDepth
from weft.llm.speculation.proposer import Proposer, ProposerFactory

#: Sampling parameter ``speculation`` of a request without it.
NONE = "none"


class _Drafting:
    """Speculation of one sequence.

    Attributes:
        acceptance: Of its drafts.
        proposer: Its proposer; None: on the device.
        num_preemptions: Of the sequence when it last sampled a token; -1: it never has.
    """

    __slots__ = ("acceptance", "num_preemptions", "proposer")

    def __init__(self, acceptance: Acceptance, proposer: Proposer | None) -> None:
        self.acceptance = acceptance
        self.proposer = proposer
        self.num_preemptions = -1


class Speculator:
    """The scheduler's ``DraftSource``: one kind of proposer, a policy for the depth, and counts for metrics.

    Args:
        name: Of the proposer, as requests name it.
        depth: Decides how many drafts a sequence gets.
        factory: Makes the proposer of a sequence; None: the runner's proposer works on the device.

    Attributes:
        name: As above.
        num_drafts: Drafts that steps have computed.
        num_accepted: Those of them that were accepted.
        num_checks: Times that a sequence had drafts in a step.
    """

    def __init__(self, name: str, depth: AdaptiveDepth, factory: ProposerFactory | None = None) -> None:
        self.name = name
        self.num_drafts = self.num_accepted = self.num_checks = 0
        self._depth = depth
        self._factory = factory

    @property
    def mean_accepted_len(self) -> float:
        """New tokens per step of a sequence with drafts, from 1; 0 before the first."""
        return 1 + self.num_accepted / self.num_checks if self.num_checks else 0.0

    def propose(self, seqs: Seq[Sequence], num_rows: int, num_left: int) -> list[Sequence]:
        """See ``DraftSource``."""
        depth = self._depth
        depth.begin(num_rows, is_greedy=not any(seq.params.temperature for seq in seqs))
        if depth.is_full:
            return []
        drafted = []
        for seq in sorted(seqs, key=attrgetter("rank")):
            if num_left <= 0 or depth.is_full:
                break
            if seq.params.speculation == NONE or seq.forks:
                continue
            drafting = cast("_Drafting | None", seq.drafting) or self._start(seq)
            has_sampled = drafting.num_preemptions == seq.num_preemptions
            drafting.num_preemptions = seq.num_preemptions
            # With all drafts accepted there is one more token.
            most = min(depth.choose(drafting.acceptance), num_left, seq.max_len - len(seq.tokens) - 1)
            if most <= 0 or (drafting.proposer is None and not has_sampled):
                continue
            if drafting.proposer is None:
                seq.drafts = [UNKNOWN_TOKEN] * most
            else:
                seq.drafts = list(drafting.proposer.propose(seq.tokens, most))
            if seq.drafts:
                depth.add(drafting.acceptance, len(seq.drafts))
                num_left -= len(seq.drafts)
                drafted.append(seq)
        return drafted

    def observe(self, seq: Sequence, samples: Seq[int], count: int) -> None:
        """See ``DraftSource``."""
        drafting = cast("_Drafting", seq.drafting)
        self._depth.observe(drafting.acceptance, len(seq.drafts), count)
        if drafting.proposer is not None:
            drafting.proposer.observe(seq.drafts, samples)
        self.num_checks += 1
        self.num_drafts += len(seq.drafts)
        self.num_accepted += count

    def _start(self, seq: Sequence) -> _Drafting:
        proposer = None if self._factory is None else self._factory(seq.max_len)
        seq.drafting = drafting = _Drafting(self._depth.new_acceptance(), proposer)
        return drafting
