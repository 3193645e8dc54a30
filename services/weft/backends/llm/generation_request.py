"""Parsing and validation of a generation request from tensors and parameters."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.backends.llm import tensors
from weft.backends.llm.text import TextCodec
from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError
from weft.llm.sampling_params import SamplingParams
from weft.serving.request.request import InferenceRequest

_SALT = "cache_salt"
_ADDS_SPECIAL_TOKENS, _PARSES_SPECIAL_TOKENS = "add_special_tokens", "parse_special_tokens"
_MAX_SALT_CHARS = 1024
_SAMPLING_NAMES = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated generation request.

    Attributes:
        prompt_ids: Prompt tokens, int32, 1-D.
        params: Sampling parameters.
        is_streamed: A response per token; False: a single response.
        outputs: Names of the outputs of each response.
        echo: Text of the prompt, to prepend to each choice; "" for none.
        salt: Requests with different salts share no cached prefix.
    """

    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    is_streamed: bool
    outputs: frozenset[str]
    echo: str
    salt: bytes


class RequestReader:
    """Parses the requests of one model.

    Args:
        codec: Its tokenizer; None: token ids only.
        max_choices: Limit of ``n``.
    """

    def __init__(self, codec: TextCodec | None, max_choices: int) -> None:
        self._codec = codec
        self._max_choices = max_choices

    def read(self, request: InferenceRequest) -> GenerationRequest:
        """Parse and validate a request.

        Raises:
            InvalidArgumentError: It is invalid; the message says what is wrong and what is allowed.
        """
        text, prompt_ids = self._prompt(request)
        outputs = self._outputs(request)
        params = self._params(request, outputs)
        is_stream = _flag(request, tensors.STREAM, False)
        excludes_input = _flag(request, tensors.EXCLUDE_INPUT, is_stream or text is None)
        if is_stream and not excludes_input:
            raise InvalidArgumentError(
                f"'{tensors.EXCLUDE_INPUT}' must not be false for a stream; put the prompt before the first response, "
                "or ask for one response"
            )
        echo = ""
        if not excludes_input and tensors.TEXT_OUTPUT in outputs and self._codec is not None:
            echo = self._codec.text(prompt_ids) if text is None else text
        return GenerationRequest(
            prompt_ids,
            params,
            is_stream and not request.is_collected,
            outputs,
            echo,
            _salt(request.call.parameters),
        )

    def _prompt(self, request: InferenceRequest) -> tuple[str | None, npt.NDArray[np.int32]]:
        """Text of the prompt, None if given as ids, and its ids."""
        if tensors.INPUT_IDS in request.call.inputs:  # in a graph, the text that was tokenized may be present as well
            return None, request.array(tensors.INPUT_IDS)
        if tensors.TEXT_INPUT not in request.call.inputs:
            raise InvalidArgumentError(
                f"one of the inputs '{tensors.TEXT_INPUT}' and '{tensors.INPUT_IDS}' must be given, got neither; where "
                "both are, the ids count"
            )
        if self._codec is None:
            raise InvalidArgumentError(
                f"input '{tensors.TEXT_INPUT}' needs a tokenizer, and the model's folder has no tokenizer.json; send "
                f"token ids as '{tensors.INPUT_IDS}'"
            )
        parameters = request.call.parameters
        adds = _boolean(parameters, _ADDS_SPECIAL_TOKENS, True)
        # A text that has the special tokens already means them, unless it is said otherwise.
        parses = _boolean(parameters, _PARSES_SPECIAL_TOKENS, not adds)
        text = request.array(tensors.TEXT_INPUT)[0]
        return self._codec.ids(text, tensors.TEXT_INPUT, adds_special_tokens=adds, parses_special_tokens=parses)

    def _outputs(self, request: InferenceRequest) -> frozenset[str]:
        requested = {output.name for output in request.call.outputs}
        if not requested:
            is_by_ids = tensors.INPUT_IDS in request.call.inputs
            requested = {tensors.OUTPUT_IDS} if is_by_ids else set()
            requested |= {tensors.TEXT_OUTPUT} if self._codec is not None else set()
            requested |= {name for name in tensors.ON_REQUEST if _flag(request, f"return_{name}", False)}
        if tensors.TEXT_OUTPUT in requested and self._codec is None:
            raise InvalidArgumentError(
                f"output '{tensors.TEXT_OUTPUT}' needs a tokenizer, and the model's folder has no tokenizer.json; ask "
                f"for '{tensors.OUTPUT_IDS}'"
            )
        return frozenset(requested)

    def _params(self, request: InferenceRequest, outputs: Collection[str]) -> SamplingParams:
        params = SamplingParams.from_json(_sampling_json(request))
        if params.n > self._max_choices:
            raise InvalidArgumentError(
                f"sampling parameter n must be at most {self._max_choices}, the sequences that run at once, got "
                f"{params.n}; send several requests"
            )
        if params.stop and self._codec is None:
            raise InvalidArgumentError(
                "sampling parameter stop needs a tokenizer, and the model's folder has no tokenizer.json; use "
                "stop_token_ids"
            )
        if tensors.CUMULATIVE_LOGPROB in outputs and params.logprobs is None:
            params = replace(params, logprobs=0)
        return params


def _sampling_json(request: InferenceRequest) -> str:
    """The sampling parameters as JSON: those of the input, else those among the request's own parameters."""
    if tensors.SAMPLING not in request.call.inputs:
        own = {name: value for name, value in request.call.parameters.items() if name in _SAMPLING_NAMES}
        return json.dumps(own) if own else ""
    raw: Any = request.array(tensors.SAMPLING)[0]
    try:
        return str(raw.decode())
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"input '{tensors.SAMPLING}' is not UTF-8: {error.reason} at byte {error.start} of {len(raw)}"
        ) from None


def _flag(request: InferenceRequest, name: str, default: bool) -> bool:
    return bool(request.array(name)[0]) if name in request.call.inputs else default


def _boolean(parameters: Mapping[str, ParameterValue], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"parameter '{name}' must be true or false, got {value!r:.80}")
    return value


def _salt(parameters: Mapping[str, ParameterValue]) -> bytes:
    salt = parameters.get(_SALT, "")
    if not isinstance(salt, str) or len(salt) > _MAX_SALT_CHARS:
        raise InvalidArgumentError(
            f"parameter '{_SALT}' must be a text of at most {_MAX_SALT_CHARS} characters, got {salt!r:.80}"
        )
    return salt.encode("utf-8", "surrogatepass")
