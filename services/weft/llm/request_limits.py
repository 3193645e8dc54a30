"""Validation of requests against the limits of an engine, before they are queued."""

import numpy as np
import numpy.typing as npt

from weft.base.errors import InvalidArgumentError
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.kv_window import kv_window
from weft.llm.request import EngineRequest
from weft.llm.sampling_params import UNLIMITED_TOKENS


class RequestLimits:
    """Rejects requests that an engine could never serve, or that would index beyond a table of the model.

    Args:
        config: The engine's, resolved.
        model_config: The model's.
        num_blocks: Blocks of the KV cache, including the null block.
    """

    def __init__(self, config: EngineConfig, model_config: TransformerConfig, num_blocks: int) -> None:
        self._vocab_size = model_config.vocab_size
        self._max_model_len = config.max_model_len
        self._speculation = config.speculation
        self._num_cached_tokens = kv_window(config, model_config).max_len(config.max_model_len, num_blocks - 1)

    def check(self, request: EngineRequest) -> None:
        """Validate the request. Any thread.

        Raises:
            InvalidArgumentError: It can never be served; the message says what is wrong, what is allowed and what to
                do.
        """
        self._check_prompt(request)
        params = request.params
        most = self._max_model_len - len(request.prompt_ids)
        if most < params.max_tokens != UNLIMITED_TOKENS:
            raise InvalidArgumentError(
                f"max_tokens must be at most {most}, which is max_model_len = {self._max_model_len} less the "
                f"{len(request.prompt_ids)} tokens of the prompt, got {params.max_tokens}; lower it"
            )
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("logit_bias", [token for token, _ in params.logit_bias])
        if params.logprobs is not None and params.logprobs > self._vocab_size:
            raise InvalidArgumentError(
                f"logprobs must be at most {self._vocab_size}, the model's number of tokens, got {params.logprobs}"
            )

        if params.speculation not in (None, "none", self._speculation):
            raise InvalidArgumentError(self._speculation_fault(params.speculation))

    def _speculation_fault(self, name: str | None) -> str:
        if self._speculation == "none":
            cure = "this model has no other; set the parameter 'speculation' of the model to have one"
            return f"speculation must be 'none', got {name!r:.80}; {cure}"
        return f"speculation must be 'none' or '{self._speculation}', which this model has, got {name!r:.80}"

    def _check_prompt(self, request: EngineRequest) -> None:
        prompt = request.prompt_ids
        if not isinstance(prompt, np.ndarray) or prompt.dtype != np.int32 or prompt.ndim != 1:
            shape = f"{prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, np.ndarray) else type(prompt).__name__
            raise InvalidArgumentError(f"prompt must be a 1-D array of int32 token ids, got {shape}")
        if not len(prompt):
            raise InvalidArgumentError("prompt is empty; give at least one token, such as the one that begins a text")
        self._check_token_ids("prompt", prompt)
        if len(prompt) >= self._max_model_len:
            raise InvalidArgumentError(
                f"prompt has {len(prompt)} tokens, but with at least one new token a text may have "
                f"{self._max_model_len} (max_model_len); shorten the prompt"
            )
        if len(prompt) >= self._num_cached_tokens:
            raise InvalidArgumentError(
                f"prompt has {len(prompt)} tokens, but with at least one new token the KV cache holds "
                f"{self._num_cached_tokens}; shorten the prompt, or raise kv_cache_bytes of the model"
            )

    def _check_token_ids(self, name: str, token_ids: npt.ArrayLike) -> None:
        ids = np.asarray(token_ids, np.int64)
        is_wrong = (ids < 0) | (ids >= self._vocab_size)
        if is_wrong.any():
            index = int(is_wrong.argmax())
            raise InvalidArgumentError(
                f"{name}: token ids of this model are 0 to {self._vocab_size - 1}, got {ids[index]} at index {index}; "
                f"use the model's own tokenizer"
            )
