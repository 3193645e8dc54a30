"""What goes into the engine and what comes out of it: requests and deltas."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from weft_common.errors import WeftError
from weft_model.llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft_model.llm.scheduler.sequence import Sequence


class TokenLogprobs(NamedTuple):
    """Log probabilities at one sampled token, of the model's own distribution: before penalties and temperature.

    Attributes:
        logprob: Of the token that was sampled.
        top_ids: The most probable tokens, best first; as many as the request asked for, maybe none.
        top_logprobs: Theirs.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Delta:
    """What one step added to one choice of a request, or the error that ended the request.

    Attributes:
        request: Whose.
        choice: Index of the choice, from 0 to ``params.n - 1``; -1 with an error, which ends every choice.
        token_ids: New tokens, oldest first. A token that ended the choice, such as end of text, is among them.
        logprobs: One for each of ``token_ids``; None where the request did not ask.
        finish_reason: ``""`` while the choice goes on; ``"stop"`` at a stop token, ``"length"`` at ``max_tokens`` or
            the end of the context.
        error: Why the request ended without an answer; then there are no tokens.
        is_last: Nothing comes for this request any more, from any choice.
        num_cached_tokens: Tokens of the prompt whose keys and values were in the cache when the choice was first run.
    """

    request: "EngineRequest"
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str = ""
    error: WeftError | None = None
    is_last: bool = False
    num_cached_tokens: int = 0


Sink = Callable[[Delta], None]


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A prompt to be continued. The caller makes it and gives it to ``Engine.submit``, which owns it from then on.

    Attributes:
        prompt_ids: Tokens of the prompt, int32, 1-D. Not modified.
        params: How to continue it.
        sink: Gets every delta, on the engine's thread, so it must not block. If it raises, the request is cancelled.
        level: Priority level, smaller is served sooner.
        arrival_ns: When the request came, by the engine's clock; 0: when it is submitted.
        deadline_ns: By the same clock: when it ends with ``DeadlineExceededError``, waiting or running. None: never.
        salt: Requests with different salts share no cached prefix. One for each tenant that must not learn of others.
        id: For logs.
        slo_ttft_ms: Promise for the time to the first token, for goodput; 0: the engine's.
        slo_tpot_ms: Promise for the mean time of each token after the first, for goodput; 0: the engine's.
        is_cancelled: Set by ``Engine.cancel``; no delta comes any more.
        sequences: One for each choice, in order, from admission until the request ends. The engine's.
        num_open: Choices that have not finished. The engine's.
    """

    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    sink: Sink
    level: int = 0
    arrival_ns: int = 0
    deadline_ns: int | None = None
    salt: bytes = b""
    id: str = ""
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0
    is_cancelled: bool = False
    sequences: list["Sequence"] = field(default_factory=list)
    num_open: int = 0
