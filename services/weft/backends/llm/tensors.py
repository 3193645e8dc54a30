"""Inputs and outputs of every language model; names and types are those of Triton's vLLM backend."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.backends.llm.adapters import ADAPTERS, adapters_of_folder
from weft.backends.llm.text import TextCodec
from weft.backends.tokenizers import FILE_NAMES, find_tokenizer
from weft.base.core import ParameterValue
from weft.base.errors import InvalidArgumentError
from weft.base.signature import RESUME_INPUT, RESUME_LOGPROB, TOKENS_OUTPUT
from weft.base.tensors import Array
from weft.base.text.suggestion import suggestion
from weft.llm.request import UNLIMITED_TOKENS, SamplingParams
from weft.llm.structured_outputs import ALIASES
from weft.llm.weights.parts import read_object
from weft.serving.request.request import InferenceRequest

CHAT_TEMPLATE = "chat_template"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
#: Texts of all special tokens, a JSON list, which clients keep out of what users write.
ALL_SPECIAL_TOKENS = "special_tokens"
#: How the model writes tool calls and reasoning, for clients that read its text.
PARSERS = ("tool_parser", "reasoning_parser")
#: Names of these parameters. The engine does not read them.
PARAMETERS = (CHAT_TEMPLATE, ALL_SPECIAL_TOKENS, *SPECIAL_TOKENS, *PARSERS)

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
#: Name of the default among several templates.
_DEFAULT = "default"


def chat_parameters(directory: Path) -> dict[str, str]:
    """The chat template, and the special tokens that it may refer to, as far as the folder defines them.

    A template in a separate file takes precedence over that of the tokenizer's configuration; of several, the default
    one is returned.

    Raises:
        InvalidArgumentError: A file cannot be read, or the configuration is not a JSON object.
    """
    file = find_tokenizer(directory)
    config = (read_object(directory / _CONFIG) or {}) if file is None else file.config
    said = {name: _text_of(config.get(name)) for name in SPECIAL_TOKENS}
    said[CHAT_TEMPLATE] = _separate_template(directory) or _template_of(config.get(CHAT_TEMPLATE))
    tokens = [] if file is None else file.added_tokens
    if special := [one["content"] for one in tokens if one.get("special") and isinstance(one.get("content"), str)]:
        said[ALL_SPECIAL_TOKENS] = json.dumps(special, ensure_ascii=False)
    return {name: value for name, value in said.items() if value is not None}


def _separate_template(directory: Path) -> str | None:
    path = directory / _TEMPLATE
    try:
        return path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None


def _text_of(token: Any) -> str | None:
    """The text of a special token, which is a string or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_of(value: Any) -> str | None:
    if isinstance(value, list):
        by_name = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = by_name.get(_DEFAULT)
    return value if isinstance(value, str) else None


#: Sampling parameters that ``generation_config.json`` may set, as in vLLM.
_GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "repetition_penalty")


def generation_defaults(directory: Path) -> dict[str, Any]:
    """Sampling parameters of the folder's ``generation_config.json``; none without the file.

    Raises InvalidArgumentError: the file is no JSON object, or a value is not allowed.
    """
    path = directory / "generation_config.json"
    given = read_object(path) or {}
    defaults = {name: given[name] for name in _GENERATION_DEFAULTS if given.get(name) is not None}
    try:
        SamplingParams.from_json("", defaults)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.message}; or set parameter 'generation_config' to none") from None
    return defaults


class TensorDeclaration(NamedTuple):
    """Type and dims of an input or output, as written in ``config.pbtxt``."""

    data_type: str
    dims: tuple[int, ...]


TEXT_INPUT, INPUT_IDS, STREAM, SAMPLING = "text_input", "input_ids", "stream", "sampling_parameters"
EXCLUDE_INPUT = "exclude_input_in_output"
TEXT_OUTPUT, FINISH_REASON, STOP_REASON = "text_output", "finish_reason", "stop_reason"
OUTPUT_IDS, CONTEXT_IDS, NUM_PREVIOUS_TOKENS = TOKENS_OUTPUT, "context_ids", "num_previous_tokens"
CUMULATIVE_LOGPROB, LOGPROBS, PROMPT_LOGPROBS = "cumulative_logprob", "logprobs", "prompt_logprobs"
#: Of the prompt alone: a request for one of these generates nothing.
PROMPT_IDS, PROMPT_TEXT = "prompt_token_ids", "prompt_text"
NUM_INPUT_TOKENS, NUM_CACHED_TOKENS, NUM_OUTPUT_TOKENS = "num_input_tokens", "num_cached_tokens", "num_output_tokens"

_TEXT, _FLAG = TensorDeclaration("TYPE_STRING", (1,)), TensorDeclaration("TYPE_BOOL", (1,))
_TEXTS, _COUNTS = TensorDeclaration("TYPE_STRING", (-1,)), TensorDeclaration("TYPE_UINT32", (-1,))
_IDS, _COUNT = TensorDeclaration("TYPE_INT32", (-1,)), TensorDeclaration("TYPE_UINT32", (1,))

#: Outputs that a request without requested outputs selects by an input ``return_<name>``.
ON_REQUEST = (
    *(OUTPUT_IDS, FINISH_REASON, CUMULATIVE_LOGPROB, LOGPROBS, PROMPT_LOGPROBS),
    *(NUM_INPUT_TOKENS, NUM_CACHED_TOKENS, NUM_OUTPUT_TOKENS),
)

INPUTS: Mapping[str, TensorDeclaration] = {
    TEXT_INPUT: _TEXT,
    INPUT_IDS: _IDS,
    STREAM: _FLAG,
    SAMPLING: _TEXT,
    EXCLUDE_INPUT: _FLAG,
    RESUME_INPUT: _IDS,
    **{f"return_{name}": _FLAG for name in ON_REQUEST},
}

OUTPUTS: Mapping[str, TensorDeclaration] = {
    TEXT_OUTPUT: _TEXTS,
    FINISH_REASON: _TEXTS,
    STOP_REASON: _TEXTS,
    CUMULATIVE_LOGPROB: TensorDeclaration("TYPE_FP32", (-1,)),
    LOGPROBS: _TEXTS,
    PROMPT_LOGPROBS: _TEXT,
    NUM_INPUT_TOKENS: _COUNT,
    NUM_CACHED_TOKENS: _COUNT,
    NUM_OUTPUT_TOKENS: _COUNTS,
    OUTPUT_IDS: _IDS,
    CONTEXT_IDS: _IDS,
    NUM_PREVIOUS_TOKENS: _COUNTS,
    PROMPT_IDS: _IDS,
    PROMPT_TEXT: _TEXT,
    ADAPTERS: _TEXT,
}


def complete(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Add every input and output, the decoupled policy, the chat template and adapters to a configuration.

    Tensors that it declares must be a subset of these; its parameters take precedence over the folder's.

    Raises:
        InvalidArgumentError: It declares other tensors, a batch dimension, or sequence batching.
    """
    done = completed(config, "llm", INPUTS, OUTPUTS)
    chat = {name: {"string_value": text} for name, text in chat_parameters(directory).items()}
    if adapters := adapters_of_folder(directory):
        chat[ADAPTERS] = {"string_value": adapters}
    done["parameters"] = chat | config.get("parameters", {})
    return done


def completed(
    config: dict[str, Any],
    backend: str,
    inputs: Mapping[str, TensorDeclaration],
    outputs: Mapping[str, TensorDeclaration],
) -> dict[str, Any]:
    """The configuration of a language model with the tensors that it does not declare, decoupled.

    Raises InvalidArgumentError: it declares other tensors, a batch dimension, or sequence batching.
    """
    name = config.get("name", "")
    if int(config.get("max_batch_size", 0)):
        raise InvalidArgumentError(
            f"model '{name}': max_batch_size must be 0, got {config['max_batch_size']}; the engine forms its own "
            "batches: parameter 'max_num_seqs' of 'llm' says how many sequences run at once"
        )
    if "sequence_batching" in config:
        raise InvalidArgumentError(
            f"model '{name}': sequence_batching is not possible with backend '{backend}'; remove it, and send the "
            "whole conversation with each request: the prefix cache keeps what was computed for it"
        )
    done = dict(config)
    for kind, known in (("input", inputs), ("output", outputs)):
        declared = list(config.get(kind, ()))
        for tensor in declared:
            _check(name, backend, kind, tensor, known)
        names = {tensor["name"] for tensor in declared}
        added = [
            {"name": each, "data_type": tensor.data_type, "dims": list(tensor.dims)}
            for each, tensor in known.items()
            if each not in names
        ]
        optional = {"optional": True} if kind == "input" else {}
        done[kind] = [{**tensor, **optional} for tensor in (*declared, *added)]
    done["max_batch_size"] = 0
    done["model_transaction_policy"] = {"decoupled": True}
    return done


def _check(
    model: str, backend: str, kind: str, tensor: Mapping[str, Any], known: Mapping[str, TensorDeclaration]
) -> None:
    name = tensor.get("name", "")
    if name not in known:
        raise InvalidArgumentError(
            f"model '{model}': backend '{backend}' has no {kind} '{name}'{suggestion(name, known)}; remove it, or all: "
            "the backend declares them itself"
        )
    wanted = known[name]
    got = TensorDeclaration(tensor.get("data_type", ""), tuple(map(int, tensor.get("dims", ()))))
    if got != wanted:
        raise InvalidArgumentError(
            f"model '{model}': {kind} '{name}' must be {wanted.data_type} {list(wanted.dims)}, got {got.data_type} "
            f"{list(got.dims)}; correct or remove it"
        )


_SALT = "cache_salt"
_ADDS_SPECIAL_TOKENS, _PARSES_SPECIAL_TOKENS = "add_special_tokens", "parse_special_tokens"
_MAX_SALT_CHARS = 1024
_SAMPLING_NAMES = frozenset((*(field.name for field in fields(SamplingParams)), *ALIASES))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A validated generation request.

    Attributes:
        prompt_ids: int32, 1-D.
        is_streamed: A response per token; False: a single response.
        outputs: Names of the outputs of each response.
        echo: Text of the prompt, to prepend to each choice; "" for none.
        salt: Requests with different salts share no cached prefix.
        bad_words: Token ids of ``params.bad_words``.
        num_dropped: Of the ``params.n`` choices that are made the least likely are not returned, so many.
        resume_token_ids: Tokens of the output that the client has; ``resume_logprob`` is the sum of their logprobs.
    """

    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    is_streamed: bool
    outputs: frozenset[str]
    echo: str
    salt: bytes
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_dropped: int = 0
    resume_token_ids: tuple[int, ...] = ()
    resume_logprob: float = 0.0


class RequestReader:
    """Parses the requests of one model; without a tokenizer only token ids; ``n`` is at most ``max_choices``.

    ``defaults`` are sampling parameters of the model, for those that a request does not have; ``max_len`` is its
    longest text in tokens.
    """

    def __init__(
        self, codec: TextCodec | None, max_choices: int, defaults: Mapping[str, Any] | None = None, max_len: int = 0
    ) -> None:
        self._codec = codec
        self._max_len = max_len
        self._max_choices = max_choices
        self._defaults = defaults or {}

    def prompt_outputs(self, request: InferenceRequest) -> dict[str, Array] | None:
        """The outputs of a request that asks for its prompt as ids or text; None: it asks for a generation.

        Raises InvalidArgumentError, also if it asks for both.
        """
        names = {output.name for output in request.call.outputs}
        own = names & {PROMPT_IDS, PROMPT_TEXT}
        if not own:
            return None
        if names - own:
            raise InvalidArgumentError(
                f"output '{min(own)}' is of the prompt alone, got a request that also wants "
                f"{', '.join(sorted(names - own))}; send two requests"
            )
        _, ids = self._prompt(request)
        if PROMPT_TEXT not in own:
            return {PROMPT_IDS: ids}
        if self._codec is None:
            raise InvalidArgumentError(f"output '{PROMPT_TEXT}' needs a tokenizer: {FILE_NAMES}")
        text = np.array([self._codec.whole_text(ids).encode()], np.object_)
        return {name: value for name, value in ((PROMPT_IDS, ids), (PROMPT_TEXT, text)) if name in own}

    def read(self, request: InferenceRequest) -> GenerationRequest:
        """Parse and validate a request. Raises InvalidArgumentError with the allowed values."""
        text, prompt_ids = self._prompt(request)
        outputs = self._outputs(request)
        params, num_dropped = self._params(request, outputs)
        resume_ids = tuple(request.array(RESUME_INPUT).tolist()) if RESUME_INPUT in request.call.inputs else ()
        is_stream = flag(request, STREAM, False)
        is_streamed = is_stream and not request.is_collected
        if is_streamed and (params.use_beam_search or num_dropped):
            raise InvalidArgumentError(
                "use_beam_search and best_of cannot be streamed, since the best choices are known at the end; set "
                f"'{STREAM}' to false"
            )
        excludes_input = flag(request, EXCLUDE_INPUT, is_stream or text is None)
        if (num_kept := self._num_kept(params)) is not None and num_kept < len(prompt_ids):
            text, prompt_ids = None, prompt_ids[-num_kept:]
        echo = ""
        if resume_ids:  # what comes with the first token has come
            params = replace(params, prompt_logprobs=None)
        elif not excludes_input and TEXT_OUTPUT in outputs and self._codec is not None:
            echo = self._codec.text(prompt_ids) if text is None else text
        return GenerationRequest(
            prompt_ids,
            params,
            is_streamed,
            outputs,
            echo,
            _salt(request.call.parameters),
            self._bad_words(params.bad_words),
            num_dropped,
            resume_ids,
            _resume_logprob(request.call.parameters),
        )

    def _prompt(self, request: InferenceRequest) -> tuple[str | None, npt.NDArray[np.int32]]:
        """Text of the prompt, None if given as ids, and its ids."""
        if INPUT_IDS in request.call.inputs:  # in a graph, the text that was tokenized may be present as well
            return None, request.array(INPUT_IDS)
        if TEXT_INPUT not in request.call.inputs:
            raise InvalidArgumentError(
                f"one of the inputs '{TEXT_INPUT}' and '{INPUT_IDS}' must be given, got neither; where "
                "both are, the ids count"
            )
        if self._codec is None:
            raise InvalidArgumentError(
                f"input '{TEXT_INPUT}' needs a tokenizer, and the model's folder has none ({FILE_NAMES}); send "
                f"token ids as '{INPUT_IDS}'"
            )
        parameters = request.call.parameters
        adds = _boolean(parameters, _ADDS_SPECIAL_TOKENS, True)
        # A text that has the special tokens already means them, unless it is said otherwise.
        parses = _boolean(parameters, _PARSES_SPECIAL_TOKENS, not adds)
        text = request.array(TEXT_INPUT)[0]
        return self._codec.ids(text, TEXT_INPUT, adds_special_tokens=adds, parses_special_tokens=parses)

    def _outputs(self, request: InferenceRequest) -> frozenset[str]:
        requested = {output.name for output in request.call.outputs}
        if not requested:
            is_by_ids = INPUT_IDS in request.call.inputs
            requested = {OUTPUT_IDS} if is_by_ids else set()
            requested |= {TEXT_OUTPUT} if self._codec is not None else set()
            requested |= {name for name in ON_REQUEST if flag(request, f"return_{name}", False)}
        if TEXT_OUTPUT in requested and self._codec is None:
            raise InvalidArgumentError(
                f"output '{TEXT_OUTPUT}' needs a tokenizer, and the model's folder has none ({FILE_NAMES}); ask "
                f"for '{OUTPUT_IDS}'"
            )
        return frozenset(requested)

    def _num_kept(self, params: SamplingParams) -> int | None:
        """The last tokens of a prompt that are kept; None: all."""
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        return max(self._max_len - (1 if params.max_tokens == UNLIMITED_TOKENS else params.max_tokens), 1)

    def _bad_words(self, words: Collection[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word, as at the start of a text and behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if self._codec is None:
                raise InvalidArgumentError(f"sampling parameter bad_words needs a tokenizer: {FILE_NAMES}")
            bare = word.lstrip(" ") or word
            for text in (bare, f" {bare}"):
                data = text.encode("utf-8", "replace")
                _, ids = self._codec.ids(data, SAMPLING, adds_special_tokens=False, parses_special_tokens=False)
                found[tuple(ids.tolist())] = None
        return tuple(ids for ids in found if ids)

    def _params(self, request: InferenceRequest, outputs: Collection[str]) -> tuple[SamplingParams, int]:
        """The parameters, with as many choices as are made as ``n``, and how many of these are dropped."""
        params = SamplingParams.from_json(sampling_json(request), self._defaults)
        num_made = params.best_of or params.n
        if num_made > self._max_choices:
            raise InvalidArgumentError(
                f"sampling parameter {'n' if num_made == params.n else 'best_of'} must be at most {self._max_choices}, "
                f"the sequences that run at once, got {num_made}; send several requests"
            )
        if params.stop and self._codec is None:
            raise InvalidArgumentError(
                f"sampling parameter stop needs a tokenizer, and the model's folder has none ({FILE_NAMES}); use "
                "stop_token_ids"
            )
        if params.logprobs is None and (CUMULATIVE_LOGPROB in outputs or num_made > params.n):
            params = replace(params, logprobs=0)
        return replace(params, n=num_made), num_made - params.n


def sampling_json(request: InferenceRequest) -> str:
    """The sampling parameters as JSON: those of the input, else those among the request's own parameters."""
    if SAMPLING not in request.call.inputs:
        own = {name: value for name, value in request.call.parameters.items() if name in _SAMPLING_NAMES}
        return json.dumps(own) if own else ""
    raw: Any = request.array(SAMPLING)[0]
    try:
        return str(raw.decode())
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"input '{SAMPLING}' is not UTF-8: {error.reason} at byte {error.start} of {len(raw)}"
        ) from None


def flag(request: InferenceRequest, name: str, default: bool) -> bool:
    """An input of one boolean; ``default`` if it is absent."""
    return bool(request.array(name)[0]) if name in request.call.inputs else default


def _boolean(parameters: Mapping[str, ParameterValue], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"parameter '{name}' must be true or false, got {value!r:.80}")
    return value


def _resume_logprob(parameters: Mapping[str, ParameterValue]) -> float:
    value = parameters.get(RESUME_LOGPROB, 0.0)
    if isinstance(value, (bool, str)) or not math.isfinite(value):
        raise InvalidArgumentError(f"parameter '{RESUME_LOGPROB}' must be a finite number, got {value!r:.80}")
    return float(value)


def _salt(parameters: Mapping[str, ParameterValue]) -> bytes:
    salt = parameters.get(_SALT, "")
    if not isinstance(salt, str) or len(salt) > _MAX_SALT_CHARS:
        raise InvalidArgumentError(
            f"parameter '{_SALT}' must be a text of at most {_MAX_SALT_CHARS} characters, got {salt!r:.80}"
        )
    return salt.encode("utf-8", "surrogatepass")
