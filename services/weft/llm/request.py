"""Input and output of the engine: requests and deltas."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import WeftError
from weft.llm.sampling_params import SamplingParams


class TokenLogprobs(NamedTuple):
    """Log probabilities at one sampled token, of the model's distribution before penalties and temperature.

    Attributes:
        logprob: That of the sampled token.
        top_ids: The most likely tokens, best first; as many as the request asked for, possibly none.
        top_logprobs: Log probabilities of ``top_ids``.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Delta:
    """New tokens of one choice of a request, or the error that ended the request.

    Attributes:
        request: The request.
        choice: Index of the choice, from 0 to ``params.n - 1``; -1 with an error, which ends every choice.
        token_ids: New tokens, oldest first, including a token that ended the choice, such as end of text.
        logprobs: One entry per token of ``token_ids``; None if the request did not ask for them.
        finish_reason: ``""`` while the choice is unfinished; ``"stop"`` at a stop token, ``"length"`` at ``max_tokens``
            or the end of the context.
        error: Why the request failed; ``token_ids`` is empty then.
        is_last: The last delta of this request, for all choices.
        num_cached_tokens: Prompt tokens found in the prefix cache when the choice was first scheduled.
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
    """A prompt to continue. The caller creates it and passes it to ``Engine.submit``, which owns it from then on.

    Attributes:
        prompt_ids: Tokens of the prompt, int32, 1-D. Not modified.
        params: Sampling parameters.
        sink: Receives every delta, on the engine's thread, so it must not block. If it raises, the request is
            cancelled.
        level: Priority level; a smaller one is served sooner.
        arrival_ns: Arrival time by the engine's clock; 0: when it is submitted.
        deadline_ns: Time by the same clock at which it fails with ``DeadlineExceededError``, waiting or running. None:
            no deadline.
        salt: Requests with different salts share no cached prefix. Use one per tenant to isolate tenants.
        id: For logs.
        slo_ttft_ms: Time-to-first-token objective, for goodput, in milliseconds; 0: the engine's.
        slo_tpot_ms: Time-per-output-token objective, for goodput, in milliseconds; 0: the engine's.
        is_cancelled: Set by ``Engine.cancel``; no further delta is delivered.
        block_hashes: Hashes of the leading full blocks of the prompt, as far as they are known. Owned by the engine.
        unique_prompt_ids: Tokens of the prompt, each once, where penalties need them; None: unknown. Owned by the
            engine.
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
    block_hashes: list[bytes] = field(default_factory=list)
    unique_prompt_ids: npt.NDArray[np.int32] | None = None
