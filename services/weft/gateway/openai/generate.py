"""Text generation: a model call for each prompt, and its deltas."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from weft.base.cancellation import cancel_and_wait
from weft.base.core import InferResult
from weft.base.errors import InternalError, InvalidArgumentError, UnavailableError
from weft.base.tensors import WireTensor, decode, split_bytes
from weft.gateway.errors import RequestError
from weft.gateway.openai.text_model import (
    FINISH_REASON,
    LOGPROBS,
    NUM_CACHED_TOKENS,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    OUTPUT_IDS,
    PROMPT_LOGPROBS,
    STOP_REASON,
    TEXT_OUTPUT,
    TextModel,
)
from weft.gateway.openai.text_request import TextRequest
from weft.v2.client.v2_client import Metadata, V2Client

#: Finish reasons of an unfinished choice.
_NO_REASON = ("", "None")
#: OpenAI's substitute for minus infinity, which JSON lacks.
_LEAST_LOGPROB = -9999.0
#: Replacement for bytes that form no character by themselves.
_NO_CHARACTER = "\ufffd"

#: A token with its log probability and bytes, as in ``/v1/chat/completions``.
TokenLogprobs: TypeAlias = dict[str, Any]


class PromptLogprobs(NamedTuple):
    """Log probabilities of the tokens of a prompt; nothing predicts the first.

    Attributes:
        tokens: Each as in ``/v1/chat/completions``; the first has the log probability None.
        by_id: As vLLM's server has them: by token id, None for the first.
    """

    tokens: list[TokenLogprobs]
    by_id: list[dict[str, Any] | None]


class ChoiceDelta(NamedTuple):
    """The tokens that one response adds to one choice; fields that the model does not report are None.

    Attributes:
        finish_reason: ``stop`` or ``length``, once, with the last delta of the choice.
        logprobs: Of its tokens, each as in ``/v1/chat/completions``: the sampled one, and the most likely ones there.
        num_input_tokens, num_cached_tokens: Tokens of the prompt, and the prefix-cached ones of these.
        stop_reason: The stop string that ended the choice; None: none did, or the model does not report it.
        prompt_logprobs: Of the tokens of the prompt, with the first delta, if asked for.
    """

    choice: int
    text: str
    finish_reason: str | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    stop_reason: str | None = None
    prompt_logprobs: "PromptLogprobs | None" = None

    @property
    def is_visible(self) -> bool:
        """Whether it has content for the client; tokens that may begin a stop string have no text yet."""
        return bool(self.text or self.finish_reason or self.logprobs)


class DeltaReader:
    """Parses the responses to one prompt; each has a text for every choice, possibly empty."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._ended: set[int] = set()

    def read(self, result: InferResult) -> Iterator[ChoiceDelta]:
        """The deltas of choices with an update.

        Raises InternalError if the tensors are inconsistent: the model violates its declared interface.
        """
        try:
            for delta in _deltas(result.outputs, self._num_choices):
                is_finished = delta.choice in self._ended
                if is_finished and not delta.text:
                    continue
                if delta.finish_reason is not None:
                    self._ended.add(delta.choice)
                yield delta
        except (InvalidArgumentError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise invalid_response(result.model_name) from error


def invalid_response(model: str) -> InternalError:
    """The error for a model that violates its declared interface."""
    return InternalError(f"the model '{model}' answered with tensors that do not fit")


def _deltas(outputs: Mapping[str, WireTensor], num_choices: int) -> Iterator[ChoiceDelta]:
    texts, reasons, logprobs, stops = (
        _strings(outputs, name) for name in (TEXT_OUTPUT, FINISH_REASON, LOGPROBS, STOP_REASON)
    )
    num_input, num_output = _numbers(outputs, NUM_INPUT_TOKENS), _numbers(outputs, NUM_OUTPUT_TOKENS)
    if texts is None:  # an optional output; what else there is counts
        texts = [""] * len(reasons or num_output or ())
    if len(texts) > num_choices:
        raise ValueError(f"{len(texts)} texts for {num_choices} choices")
    prompt = _prompt_logprobs(_strings(outputs, PROMPT_LOGPROBS))
    num_cached, ids = _numbers(outputs, NUM_CACHED_TOKENS), _numbers(outputs, OUTPUT_IDS)
    first_id = 0
    for choice, text in enumerate(texts):
        num_tokens = num_output[choice] if num_output else None
        own_ids = ids[first_id : first_id + num_tokens] if ids and num_tokens is not None else []
        first_id += num_tokens or 0
        yield ChoiceDelta(
            choice,
            text,
            None if not reasons or reasons[choice] in _NO_REASON else reasons[choice],
            _logprobs(json.loads(logprobs[choice] or "null"), own_ids) if logprobs else None,
            num_input[0] if num_input else None,
            num_tokens,
            num_cached[0] if num_cached else None,
            (stops[choice] or None) if stops else None,
            prompt,
        )


def _strings(outputs: Mapping[str, WireTensor], name: str) -> list[str] | None:
    if name not in outputs:
        return None
    return [text.decode(errors="replace") for text in split_bytes(outputs[name].data, name=name)]


def _numbers(outputs: Mapping[str, WireTensor], name: str) -> list[int] | None:
    return decode(outputs[name], name=name).ravel().tolist() if name in outputs else None


def _prompt_logprobs(texts: list[str] | None) -> PromptLogprobs | None:
    maps = json.loads(texts[0]) if texts else None
    if maps is None:
        return None
    tokens = _logprobs(maps, [next(iter(by_id)) for by_id in maps]) or []
    by_id = [{key: {**one, "logprob": _bounded(one["logprob"])} for key, one in by_id.items()} for by_id in maps[1:]]
    return PromptLogprobs(tokens, [None, *by_id])


def _bounded(logprob: float | None) -> float | None:
    return logprob if logprob is None or logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def _logprobs(maps: Any, ids: Sequence[object]) -> list[TokenLogprobs] | None:
    """Read those of a delta's tokens: per token a map from ids to ``logprob``, ``rank`` and ``decoded_token``.

    The sampled token is the one of ``ids``; if the model does not report ids, the one without a rank, else the first.
    """
    if maps is None:
        return None
    found = []
    for index, by_id in enumerate(maps):
        unranked = next((key for key, one in by_id.items() if one["rank"] is None), next(iter(by_id), ""))
        sampled = str(ids[index]) if index < len(ids) else unranked
        ranked = sorted((one for one in by_id.values() if one["rank"] is not None), key=lambda one: int(one["rank"]))
        found.append(_token(by_id[sampled]) | {"top_logprobs": [_token(one) for one in ranked]})
    return found


def _token(value: Mapping[str, Any]) -> TokenLogprobs:
    """A token with its log probability, and its bytes, possibly incomplete characters; None: unknown."""
    text, data = value["decoded_token"] or "", value.get("bytes")
    if data is None and _NO_CHARACTER not in text:
        data = text.encode()
    return {
        "token": text,
        "logprob": _bounded(value["logprob"]),
        "bytes": None if data is None else list(data),
    }


def completion_logprobs(tokens: Sequence[TokenLogprobs] | None, text_offset: int) -> dict[str, Any] | None:
    """Format of ``/v1/completions``; None: not requested.

    ``top_logprobs`` is keyed by text, so among tokens with the same text only the most likely one is reported. The text
    of the first token begins at ``text_offset`` in the choice, in characters; below 0: it does not show.
    """
    if tokens is None:
        return None
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    for one in tokens:
        offsets.append(max(text_offset, 0))
        text_offset += len(one["token"])
        best: dict[str, float] = {}
        for token in (*one["top_logprobs"], one):
            best.setdefault(token["token"], token["logprob"])
        tops.append(None if one["logprob"] is None else best)
    return {
        "tokens": [one["token"] for one in tokens],
        "token_logprobs": [one["logprob"] for one in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[TokenLogprobs] | None, num_top: int) -> dict[str, Any] | None:
    """Format of ``/v1/chat/completions``, with at most ``num_top`` alternatives per token; None: not requested."""
    if tokens is None:
        return None
    content = [{**one, "top_logprobs": one["top_logprobs"][:num_top]} for one in tokens]
    return {"content": content, "refusal": None}


#: Parameter of a graph's last response: a stream in it broke off.
_INCOMPLETE = "graph_incomplete"
#: Deltas of several prompts that may be queued for the client.
_MAX_QUEUED = 16


async def generate(
    router: V2Client,
    model: TextModel,
    request: TextRequest,
    *,
    request_id: str,
    metadata: Metadata,
    timeout_s: float,
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the deltas of every prompt in order of arrival; the choices of prompt ``i`` start at ``i * num_choices``.

    All prompts are generated concurrently, and all choices of a model that makes one for each call. The first error
    ends all. Closing the iterator cancels the calls.

    Raises:
        RequestError: The model does not support the request.
        RemoteError: See ``V2Client.stream``.
        InternalError: See ``DeltaReader.read``.
        UnavailableError: The model is a graph, and a stream in it broke off.
    """
    if model.has_one_choice and request.num_choices > 1 and {"best_of", "use_beam_search"} & request.sampling.keys():
        raise RequestError(f"the model '{model.name}' makes one answer for each call; leave 'n' out", param="n")
    parts = request.of_one_choice() if model.has_one_choice else [request]
    wanted = [(part, prompt) for prompt in request.prompts for part in parts]
    ids = [request_id, *(f"{request_id}-{index}" for index in range(1, len(wanted)))]
    requests = [model.make_request(part, prompt, one) for (part, prompt), one in zip(wanted, ids, strict=True)]

    async def deltas_of(index: int) -> AsyncGenerator[ChoiceDelta, None]:
        num_choices = request.num_choices // len(parts)
        reader, first = DeltaReader(num_choices), index * num_choices
        stream = router.stream(requests[index], timeout_s=timeout_s, metadata=metadata)
        try:
            async with contextlib.aclosing(stream) as results:
                async for result in results:
                    if broken := result.parameters.get(_INCOMPLETE):
                        raise UnavailableError(f"the answer of '{model.name}' is incomplete: {broken}; send it again")
                    for delta in reader.read(result):
                        yield delta._replace(choice=first + delta.choice)
        except InvalidArgumentError as error:  # it cannot be read
            raise invalid_response(model.name) from error

    sources = [deltas_of(index) for index in range(len(requests))]
    async with contextlib.aclosing(sources[0] if len(sources) == 1 else merge(sources)) as deltas:
        async for delta in deltas:
            yield delta


async def merge(sources: Iterable[AsyncGenerator[ChoiceDelta, None]]) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the deltas of all sources in order of arrival; the first error ends all.

    Closing the iterator closes the sources.
    """
    queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(_MAX_QUEUED)

    async def forward(source: AsyncGenerator[ChoiceDelta, None]) -> None:
        """Every delta is handed on, then None, or what the source failed with."""
        end: Exception | None = None
        try:
            async with contextlib.aclosing(source):
                async for delta in source:
                    await queue.put(delta)
                    await asyncio.sleep(0)  # fairness: a source that is always ready would fill the queue alone
        except Exception as error:
            end = error
        await queue.put(end)

    tasks = [asyncio.create_task(forward(source)) for source in sources]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await cancel_and_wait(tasks)


@dataclass(slots=True)
class Usage:
    """Token counts of a request so far.

    Attributes:
        num_choices: Choices per prompt.
        num_input_tokens: Tokens of each prompt, by its index; absent until the model reports it.
        num_cached_tokens: Of these, the prefix-cached ones.
        num_output_tokens: Total of all choices.
        is_known: Whether the model reports token counts.
    """

    num_choices: int
    num_input_tokens: dict[int, int] = field(default_factory=dict)
    num_cached_tokens: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    is_known: bool = False

    def add(self, delta: ChoiceDelta) -> None:
        """Count the tokens of a delta."""
        if delta.num_input_tokens is not None:
            self.num_input_tokens[delta.choice // self.num_choices] = delta.num_input_tokens
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens[delta.choice // self.num_choices] = delta.num_cached_tokens
        if delta.num_output_tokens is not None:
            self.is_known = True
            self.num_output_tokens += delta.num_output_tokens

    def as_json(self) -> dict[str, Any] | None:
        """OpenAI's ``usage`` object; None if the model does not report token counts."""
        if not self.is_known:
            return None
        num_input_tokens = sum(self.num_input_tokens.values())
        usage: dict[str, Any] = {
            "prompt_tokens": num_input_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": num_input_tokens + self.num_output_tokens,
        }
        if self.num_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self.num_cached_tokens.values())}
        return usage


@dataclass(slots=True)
class CollectedChoice:
    """A complete choice; ``logprobs`` of all its tokens, and of the prompt, are None if the model reports none."""

    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None


async def collect(deltas: AsyncGenerator[ChoiceDelta, None], num_choices: int, usage: Usage) -> list[CollectedChoice]:
    """Collect every choice and count tokens in ``usage``. Closes ``deltas`` and raises its errors."""
    choices = [CollectedChoice() for _ in range(num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            usage.add(delta)
            choice = choices[delta.choice]
            texts[delta.choice].append(delta.text)
            if delta.logprobs is not None:
                choice.logprobs = [*(choice.logprobs or ()), *delta.logprobs]
            choice.finish_reason = delta.finish_reason or choice.finish_reason
            choice.prompt_logprobs = delta.prompt_logprobs or choice.prompt_logprobs
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return choices
