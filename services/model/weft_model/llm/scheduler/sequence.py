"""One sequence of tokens that grows: ``Sequence``, and the static order in which sequences are served."""

from array import array
from enum import Enum, auto
from typing import TYPE_CHECKING

from weft_model.llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft_model.llm.request import EngineRequest
    from weft_model.llm.scheduler.penalty_row import PenaltyRow


class SequenceStatus(Enum):
    """Where a sequence stands."""

    #: Waits for a seat; owns no block.
    WAITING = auto()
    #: Waits until its parent's prompt is computed, to begin as a copy of it; owns no block.
    FORKING = auto()
    #: Has a seat, and blocks for every token that it will compute next.
    RUNNING = auto()
    #: Ended: finished, cancelled, failed or past its deadline; owns nothing.
    ENDED = auto()


class Sequence:
    """Tokens of one choice of one request, and what the scheduler keeps for it. The scheduler changes it.

    Nothing says whether it reads a prompt or writes an answer: ``remaining`` tokens have no keys and values yet, and
    when none of the known ones is left, a new token is sampled.

    Args:
        request: What it belongs to; ``prompt_ids``, ``params``, ``level``, ``arrival_ns``, ``deadline_ns`` and
            ``salt`` are read. Sequences whose requests have different salts share no block.
        sequence_id: Unique in the engine and larger than those of sequences made before.
        choice: Index among the request's choices.
        seed: Of its random numbers, a signed 64-bit number.
        eos_token_ids: Tokens that end it unless its parameters say otherwise.
        parent: The request's first choice, whose prompt is computed for this one too; None for the first.

    Attributes:
        id: ``sequence_id``.
        tokens: Prompt and output, int32. A NumPy view must not outlive the next ``append``. Those of its parent until
            ``start``, since a hundred copies of a long prompt that only waits would fill the memory.
        num_prompt: Tokens of the prompt.
        num_done: Tokens whose keys and values are valid, from the first on.
        num_cached: Tokens that the cache had when the sequence was first seated; -1 before.
        table: Blocks, in order; empty without a seat.
        hashes: Chain hashes of the full blocks, as far as they were needed.
        slot: Row in the runner's tables; -1 without a seat.
        level: Priority level, smaller is served sooner.
        rank: Order of service; smaller is served sooner; never changes after ``Scheduler.add``.
        stop_ids: Tokens that end it.
        max_len: Length at which it ends; set by ``Scheduler.add``.
        penalties: Its row of penalties; None where it asks for none or has not been seated.
        forks: Sequences that begin as copies once its prompt is computed.
        is_cancelled: Nobody wants it any more; set by ``Scheduler.cancel``.
        num_preempted: Times that it lost its seat.
        first_seat_ns: When it first got one; 0 before.
        num_logprobs: Likeliest tokens to report with each new one; -1: no log probabilities.
        num_scheduled: Tokens that the step under way computes for it; the scheduler's.
        num_found: Blocks that were cached when they were last looked for; -1: never were; the scheduler's.
        num_synced: Entries of ``table`` that the runner knows; -1: not even the slot is; the scheduler's.
        copy_source: Block to be copied, before the step, into the one that its next token goes to; -1: none; the
            scheduler's.
        root: Start of its chain of hashes; empty before the first hash; the scheduler's.
    """

    __slots__ = (
        "choice",
        "copy_source",
        "first_seat_ns",
        "forks",
        "hashes",
        "id",
        "is_cancelled",
        "level",
        "max_len",
        "num_cached",
        "num_done",
        "num_found",
        "num_logprobs",
        "num_preempted",
        "num_prompt",
        "num_scheduled",
        "num_synced",
        "params",
        "parent",
        "penalties",
        "rank",
        "request",
        "root",
        "seed",
        "slot",
        "status",
        "stop_ids",
        "table",
        "tokens",
    )

    def __init__(
        self,
        request: "EngineRequest",
        sequence_id: int,
        *,
        choice: int = 0,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        parent: "Sequence | None" = None,
    ) -> None:
        params: SamplingParams = request.params
        self.request = request
        self.id = sequence_id
        self.choice = choice
        self.params = params
        self.num_logprobs = -1 if params.logprobs is None else params.logprobs
        self.seed = seed
        self.parent = parent
        self.tokens: array[int] = parent.tokens if parent is not None else array("i", request.prompt_ids.tobytes())
        self.num_prompt = len(request.prompt_ids)
        self.num_done = 0
        self.num_cached = -1
        self.table: list[int] = []
        self.hashes: list[bytes] = []
        self.root = b""
        self.slot = -1
        self.level = request.level
        self.rank: tuple[int, ...] = (request.level, request.arrival_ns, sequence_id)
        eos = () if params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset((*params.stop_token_ids, *eos))
        self.max_len = self.num_prompt + params.max_tokens
        self.penalties: PenaltyRow | None = None
        self.forks: list[Sequence] = []
        self.status = SequenceStatus.WAITING
        self.is_cancelled = False
        self.num_preempted = 0
        self.first_seat_ns = 0
        self.num_scheduled = 0
        self.num_synced = -1
        self.copy_source = -1
        self.num_found = -1

    def __repr__(self) -> str:
        done, known = self.num_done, len(self.tokens)
        return f"Sequence({self.id}, level {self.level}, {self.status.name}, {done} of {known} tokens done)"

    @property
    def remaining(self) -> int:
        """Known tokens without keys and values."""
        return len(self.tokens) - self.num_done

    @property
    def num_output(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - self.num_prompt if self.parent is None else 0

    def start(self) -> None:
        """It has tokens of its own, and its parent is nothing to it any more."""
        if self.parent is not None:
            self.tokens = self.tokens[: self.num_prompt]
            self.parent = None

    def append(self, token: int) -> None:
        """``token`` is its last one."""
        self.tokens.append(token)
        if self.penalties is not None:
            self.penalties.append(token)
