"""One growing sequence of tokens and its penalties: ``Sequence``, ``PenaltyRow``."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from weft.llm.grammar import GrammarMatcher
from weft.llm.request import EngineRequest, SamplingParams, StepLogprobs
from weft.llm.token_filter import TokenFilter

_NEITHER = -1
_FORBIDDEN = float("-inf")


class PenaltyRow:
    """Token counts and biases of one sequence: unique tokens of prompt, output and biases; appending costs O(1).

    Args:
        stop_ids: Stop tokens, suppressed until the sequence has ``min_tokens`` new tokens.
        unique_prompt_ids: Tokens of the prompt, each once, int32; None: to be found.

    Attributes:
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


class SequenceStatus(Enum):
    """Lifecycle state of a sequence."""

    #: Waits for a slot; owns no block.
    WAITING = auto()
    #: Waits until its parent's prompt is computed, to fork from it; owns no block.
    FORKING = auto()
    #: Has a slot, and blocks for all its known tokens; with a sliding window, for those within it and of a step.
    RUNNING = auto()
    #: Finished, cancelled, failed or past its deadline; owns nothing.
    ENDED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Tokens of one choice of one request, with the scheduler's state for it. Changed only by the scheduler.

    There is no prefill or decode phase: ``remaining`` tokens have no keys and values yet, and after the last of them is
    computed, a new token is sampled. Sequences whose requests have different salts share no block.

    Args:
        id: Unique in the engine, and increasing.
        seed: Seed of its sampling noise, a signed 64-bit number.
        eos_token_ids: Stop tokens unless its parameters say otherwise.
        parent: The request's first choice, from which this one forks once the prompt is computed; None for the first.
    """

    request: EngineRequest
    id: int
    choice: int = 0
    seed: int = 0
    eos_token_ids: InitVar[tuple[int, ...]] = ()
    parent: "Sequence | None" = None
    params: SamplingParams = field(init=False)
    level: int = field(init=False)
    #: Most likely tokens to report with each new one; -1: no log probabilities.
    num_logprobs: int = field(init=False)
    #: Prompt and output, int32. A NumPy view must not outlive the next ``append``. Shared with the parent until
    #: ``start``, because a hundred waiting copies of a long prompt would fill the memory.
    tokens: "array[int]" = field(init=False)
    num_prompt: int = field(init=False)
    #: Known tokens without keys and values; drafts are not known.
    remaining: int = field(init=False)
    #: Order of service, smaller is sooner; constant after ``Scheduler.add``.
    rank: tuple[int, ...] = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    #: Length at which it ends; lowered by ``Scheduler.add``.
    max_len: int = field(init=False)
    #: Chain hashes of the full blocks, as far as they were needed, and the start of the chain, empty before.
    hashes: list[bytes] = field(init=False)
    root: bytes = b""
    #: Tokens that the current step computes for it; 1 from step to step while it has a ``row``.
    num_scheduled: int = 0
    #: Row in ``Decodes``; -1 unless it runs and has one token to compute.
    row: int = -1
    #: Row in the runner's tables; -1 without a slot.
    slot: int = -1
    #: None: it has no penalties, or never had a slot.
    penalties: PenaltyRow | None = None
    #: Where its output stands in the grammar of the request, and which tokens that has; None: it may say anything.
    matcher: GrammarMatcher | TokenFilter | None = None
    #: Log probabilities of its prompt's tokens so far, and of how many; None: nobody asks, or they have been given.
    scores: list[StepLogprobs] | None = None
    num_scored: int = 0
    #: Sequences that fork from it once its prompt is computed.
    forks: "list[Sequence]" = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    is_cancelled: bool = False
    num_preemptions: int = 0
    #: When it first got a slot, 0 before; and how many tokens it then found in the prefix cache.
    first_scheduled_ns: int = 0
    num_cached: int = -1
    #: Blocks, in order; the first ``num_behind`` are null blocks, behind the window. Empty without a slot.
    block_table: list[int] = field(default_factory=list)
    num_behind: int = 0
    #: What the runner knows of the table; -1 blocks: it does not know the slot either.
    num_uploaded_blocks: int = -1
    num_uploaded_behind: int = 0
    #: Cached blocks at the last lookup; -1: never looked up.
    num_matched_blocks: int = -1
    #: Guesses of the tokens that follow ``tokens``, computed and checked by the current step.
    drafts: list[int] = field(default_factory=list)
    #: State of its speculation, owned by the scheduler's ``DraftSource``; None: not started.
    drafting: object = None

    def __post_init__(self, eos_token_ids: tuple[int, ...]) -> None:
        request = self.request
        params = self.params = request.params
        self.level = request.level
        self.num_logprobs = -1 if params.logprobs is None else params.logprobs
        self.tokens = self.parent.tokens if self.parent is not None else array("i", request.prompt_ids.tobytes())
        self.num_prompt = len(request.prompt_ids)
        self.tokens.extend(request.resume_token_ids)
        self.remaining = len(self.tokens)
        self.rank = (request.level, request.arrival_ns, self.id)
        self.stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignores_eos else eos_token_ids)))
        self.matcher = grammar = None if request.grammar is None else request.grammar.matchers[self.choice]
        if params.allowed_token_ids or request.bad_words:
            self.matcher = TokenFilter(params.allowed_token_ids, request.bad_words, grammar, request.resume_token_ids)
        self.max_len = self.num_prompt + params.max_tokens
        self.hashes = request.block_hashes[:]

    def __repr__(self) -> str:
        done, known = self.num_computed_tokens, len(self.tokens)
        return f"Sequence({self.id}, level {self.level}, {self.status.name}, {done} of {known} tokens done)"

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens with valid keys and values."""
        return len(self.tokens) - self.remaining

    @property
    def to_score(self) -> range:
        """Positions of the current step after which the log probability of the prompt's next token is asked for."""
        first, end = self.num_computed_tokens, self.num_computed_tokens + self.num_scheduled
        return range(0) if self.scores is None else range(max(first, self.num_scored), min(end, self.num_prompt - 1))

    @property
    def is_sampled(self) -> bool:
        """Whether the current step computes all its known tokens and drafts, so that a new token is sampled."""
        return self.num_scheduled == self.remaining + len(self.drafts)

    @property
    def num_output(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - self.num_prompt if self.parent is None else 0

    def start(self) -> None:
        """Detach from the parent: take a copy of the prompt."""
        if self.parent is not None:
            self.tokens = self.tokens[: self.num_prompt]
            self.parent = None

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens that remain to be computed, and end with the next one."""
        self.tokens.extend(token_ids)
        self.remaining = len(self.tokens)
        self.max_len = self.remaining + 1

    def append(self, token: int) -> None:
        """Append a sampled token, which remains to be computed, and ``observe`` it."""
        self.tokens.append(token)
        self.remaining += 1
        self.observe(token)

    def observe(self, token: int) -> None:
        """Count a new token in the penalties, and advance in the grammar."""
        if self.penalties is not None:
            self.penalties.append(token)
        if self.matcher is not None:
            self.matcher.append(token)
