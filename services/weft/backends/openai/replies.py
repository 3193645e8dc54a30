"""Bodies for another server from requests, and tensors from its answers, as those of the backend ``llm``."""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from weft.backends.llm import tensors
from weft.backends.openai.settings import EMBEDDING, MESSAGES, Settings
from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.tensors import Array
from weft.serving.request.request import InferenceRequest

_MAX_CHOICES = 128
_UNLIMITED_TOKENS = 2**31 - 1
_DEFAULT_TOKENS = 16
#: Finish reason of an unfinished choice, as of the backend ``llm``.
_NOT_FINISHED = "None"
_PATHS = {"chat": "/chat/completions", "completions": "/completions", "embeddings": "/embeddings"}
#: Sampling parameters of Weft alone.
_OWN_SAMPLING = ("speculation",)


class ForeignCall(NamedTuple):
    """A request as the other server takes it.

    Attributes:
        num_choices: Texts of each response.
        echo: Text before each choice; "" for none.
    """

    path: str
    body: Mapping[str, Any]
    is_streamed: bool
    num_choices: int
    outputs: frozenset[str]
    echo: str


def read_generation(request: InferenceRequest, settings: Settings) -> ForeignCall:
    """The call for a request that generates text. Raises InvalidArgumentError."""
    inputs = request.call.inputs
    sampling = _sampling(request)
    num_choices = sampling.get("n", 1)
    if type(num_choices) is not int or not 1 <= num_choices <= _MAX_CHOICES:
        raise InvalidArgumentError(f"sampling parameter n must be from 1 to {_MAX_CHOICES}, got {num_choices!r:.40}")
    text = None
    body: dict[str, Any] = {}
    if settings.api == "chat":
        if MESSAGES in inputs:
            body["messages"] = _json(_text(request, MESSAGES), list, f"input '{MESSAGES}' must be a JSON array")
        elif tensors.TEXT_INPUT in inputs:
            text = _text(request, tensors.TEXT_INPUT)
            body["messages"] = [{"role": "user", "content": text}]
    elif tensors.INPUT_IDS in inputs:
        body["prompt"] = request.array(tensors.INPUT_IDS).tolist()
    elif tensors.TEXT_INPUT in inputs:
        body["prompt"] = text = _text(request, tensors.TEXT_INPUT)
    if not body:
        wanted = (MESSAGES if settings.api == "chat" else tensors.INPUT_IDS, tensors.TEXT_INPUT)
        raise InvalidArgumentError(f"one of the inputs '{wanted[0]}' and '{wanted[1]}' must be given, got neither")
    is_stream = tensors.flag(request, tensors.STREAM, False)
    is_streamed = is_stream and not request.is_collected
    body |= {"model": settings.model, "stream": is_streamed}
    if is_streamed:
        body["stream_options"] = {"include_usage": True}
    excludes_input = tensors.flag(request, tensors.EXCLUDE_INPUT, is_stream or text is None)
    outputs = {output.name for output in request.call.outputs} or {
        tensors.TEXT_OUTPUT,
        *(name for name in tensors.ON_REQUEST if tensors.flag(request, f"return_{name}", False)),
    }
    if tensors.CUMULATIVE_LOGPROB in outputs:
        sampling.setdefault("logprobs", 0)
    given = _sampling_fields(sampling, settings)
    echo = "" if excludes_input or text is None else text
    return ForeignCall(_PATHS[settings.api], given | body, is_streamed, num_choices, frozenset(outputs), echo)


def read_embedding(request: InferenceRequest, settings: Settings) -> ForeignCall:
    """The call for the vectors of all rows of a request. Raises InvalidArgumentError."""
    texts = [_decoded(text, tensors.TEXT_INPUT) for text in request.array(tensors.TEXT_INPUT).ravel().tolist()]
    body = {"model": settings.model, "input": texts, "encoding_format": "base64"}
    return ForeignCall(_PATHS[settings.api], body, False, len(texts), frozenset(), "")


def _sampling(request: InferenceRequest) -> dict[str, Any]:
    sampling = _json(tensors.sampling_json(request) or "{}", dict, "sampling parameters must be a JSON object")
    return {name: value for name, value in sampling.items() if value is not None and name not in _OWN_SAMPLING}


def _sampling_fields(sampling: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The sampling parameters as fields of a body; others than these are the server's to refuse."""
    is_chat = settings.api == "chat"
    max_tokens = sampling.pop("max_tokens", _DEFAULT_TOKENS)
    if max_tokens != _UNLIMITED_TOKENS:
        sampling[settings.max_tokens_field if is_chat else "max_tokens"] = max_tokens
    elif not is_chat:
        raise InvalidArgumentError(
            "sampling parameter max_tokens must be given: with 'api' completions the server generates 16 without it"
        )
    if is_chat and "logprobs" in sampling:
        sampling["top_logprobs"] = sampling["logprobs"]
        sampling["logprobs"] = True
    return sampling


def _text(request: InferenceRequest, name: str) -> str:
    return _decoded(request.array(name)[0], name)


def _decoded(text: Any, name: str) -> str:
    try:
        return str(text.decode())
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from None


def _json(text: str, kind: type, must_be: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{must_be}: {error}") from None
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{must_be}, got {value!r:.40}")
    return value


class Reply:
    """Collects what the server says of one request between two responses."""

    def __init__(self, call: ForeignCall, where: str) -> None:
        self._call = call
        self._where = where
        self._texts = [call.echo] * call.num_choices
        self._reasons = [""] * call.num_choices
        self._logprobs: list[list[Any]] = [[] for _ in range(call.num_choices)]
        self._sums = [0.0] * call.num_choices
        self._usage: Mapping[str, Any] = {}

    def add(self, said: Mapping[str, Any]) -> bool:
        """Add a response or a chunk; return whether there is new text. Raises UnavailableError if it is malformed."""
        try:
            for choice in said.get("choices") or ():
                index = choice.get("index", 0)
                part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
                self._texts[index] += part.get("content") or ""
                self._reasons[index] = choice.get("finish_reason") or self._reasons[index]
                for entries in _token_entries(choice.get("logprobs") or {}):
                    self._logprobs[index].append(entries)
                    self._sums[index] += entries["0"]["logprob"]
            self._usage = said.get("usage") or self._usage
            self._numbers()
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UnavailableError(
                f"{self._where} answers with what is not of OpenAI's interface: {type(error).__name__}: {error}"
            ) from None
        return any(self._texts)

    def take(self, *, is_final: bool) -> dict[str, Array]:
        """The outputs of the next response. Token counts come with the last one, those of all choices with the first.

        Raises UnavailableError: it is the last one, and a choice has not ended.
        """
        if is_final and not all(self._reasons):
            raise UnavailableError(f"{self._where} ended its answer before a choice was finished")
        num_input, num_cached, num_output = self._numbers() if is_final else (0, 0, 0)
        counts = [num_output] + [0] * (len(self._texts) - 1)
        reports = "logprobs" in self._call.body
        logprobs = [json.dumps(entries) if reports else "null" for entries in self._logprobs]
        found: dict[str, Array] = {
            tensors.TEXT_OUTPUT: _texts(self._texts),
            tensors.FINISH_REASON: _texts([(is_final and reason) or _NOT_FINISHED for reason in self._reasons]),
            tensors.LOGPROBS: _texts(logprobs),
            tensors.CUMULATIVE_LOGPROB: np.array(self._sums, np.float32),
            tensors.NUM_INPUT_TOKENS: np.array([num_input], np.uint32),
            tensors.NUM_CACHED_TOKENS: np.array([num_cached], np.uint32),
            tensors.NUM_OUTPUT_TOKENS: np.array(counts, np.uint32),
        }
        self._texts = [""] * len(self._texts)
        self._logprobs = [[] for _ in self._logprobs]
        return {name: array for name, array in found.items() if name in self._call.outputs}

    def vectors(self, said: Mapping[str, Any]) -> dict[str, Array]:
        """Embeddings FP32 ``[n, d]`` of an answer, and the tokens of all rows in the first of ``[n, 1]``."""
        num_rows = self._call.num_choices
        try:
            by_index = {one["index"]: _vector(one["embedding"]) for one in said["data"]}
            rows = np.stack([by_index[index] for index in range(num_rows)])
            counts = np.zeros((num_rows, 1), np.uint32)
            counts[0] = (said.get("usage") or {}).get("prompt_tokens") or 0
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UnavailableError(f"{self._where} answers with what are no embeddings: {error}") from None
        return {EMBEDDING: rows, tensors.NUM_INPUT_TOKENS: counts}

    def _numbers(self) -> tuple[int, int, int]:
        usage = self._usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        found = [usage.get("prompt_tokens"), cached, usage.get("completion_tokens")]
        num_input, num_cached, num_output = (int(np.uint32(each or 0)) for each in found)
        return num_input, num_cached, num_output


def _texts(texts: list[str]) -> Array:
    return np.array([text.encode("utf-8", "replace") for text in texts], np.object_)


def _vector(value: Any) -> Array:
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), "<f4").astype(np.float32)
    return np.array(value, np.float32)


def _token_entries(value: Mapping[str, Any]) -> Iterator[dict[str, dict[str, Any]]]:
    """For each token its entries by a running number, as the backend ``llm`` has them by token id; the sampled is 0."""
    if content := value.get("content"):
        tokens = [
            (one["token"], one["logprob"], one.get("bytes"), [_parts(top) for top in one.get("top_logprobs") or ()])
            for one in content
        ]
    else:
        texts, tops = value.get("tokens") or [], value.get("top_logprobs")
        tokens = [
            (text, logprob, None, [(key, top, None) for key, top in (tops[i] or {}).items()] if tops else [])
            for i, (text, logprob) in enumerate(zip(texts, value.get("token_logprobs") or (), strict=True))
        ]
    for text, logprob, data, top in tokens:
        ranked = sorted(top, key=lambda one: -one[1])
        rank = next((i for i, one in enumerate(ranked, 1) if one[0] == text), None)
        yield {"0": _entry(text, logprob, data, rank)} | {
            str(i): _entry(*one, i) for i, one in enumerate(ranked, 1) if i != rank
        }


def _parts(top: Mapping[str, Any]) -> tuple[str, float, list[int] | None]:
    return top["token"], top["logprob"], top.get("bytes")


def _entry(text: str, logprob: float, data: list[int] | None, rank: int | None) -> dict[str, Any]:
    return {"logprob": float(logprob), "rank": rank, "decoded_token": text, "bytes": data}
