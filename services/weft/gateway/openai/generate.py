"""Text generation: one call of the model per prompt, their deltas merged, and OpenAI's responses made of them."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.gateway.errors import openai_body
from weft.gateway.http.responding import DONE, event_stream
from weft.gateway.openai.deltas import ChoiceDelta, DeltaReader, PositionLogprobs, invalid_response
from weft.gateway.openai.endpoint import EndpointCall
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import Prompt, TextRequest
from weft.v2.client.v2_client import Metadata, V2Client

#: Parameter of a graph's last response: a stream in it broke off.
_INCOMPLETE = "graph_incomplete"
#: Deltas of several prompts that may be queued for the client.
_MAX_QUEUED = 16


async def generate(
    router: V2Client,
    model: TextModel,
    request: TextRequest,
    prompts: Sequence[Prompt],
    *,
    request_id: str,
    metadata: Metadata,
    timeout_s: float,
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the deltas of every prompt in order of arrival; the choices of prompt ``i`` start at ``i * num_choices``.

    All prompts are generated concurrently. The first error ends all. Closing the iterator cancels the calls.

    Raises:
        RequestError: The model does not support the request.
        RemoteError: See ``V2Client.stream``.
        InternalError: See ``DeltaReader.read``.
        UnavailableError: The model is a graph, and a stream in it broke off.
    """
    ids = [request_id, *(f"{request_id}-{index}" for index in range(1, len(prompts)))]
    requests = [model.make_request(request, prompt, one) for prompt, one in zip(prompts, ids, strict=True)]

    async def deltas_of(index: int) -> AsyncGenerator[ChoiceDelta, None]:
        reader, first = DeltaReader(request.num_choices), index * request.num_choices
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
    """A complete choice; ``logprobs`` of all its tokens are None if the model reports none."""

    text: str = ""
    logprobs: list[PositionLogprobs] | None = None
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
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return choices


class ResponseForm(NamedTuple):
    """How an endpoint writes its responses.

    Attributes:
        id_prefix: Of the id of a response.
        object, chunk_object: Type of a response, and of a chunk of one.
        choice: A complete choice as JSON, given its index.
        delta_choices: What the chunks for a delta have as their only choice.
    """

    id_prefix: str
    object: str
    chunk_object: str
    choice: Callable[[int, CollectedChoice], dict[str, Any]]
    delta_choices: Callable[[ChoiceDelta], Iterable[dict[str, Any]]]


async def text_response(
    call: EndpointCall, model: TextModel, request: TextRequest, prompts: Sequence[Prompt], form: ResponseForm
) -> ASGIApp:
    """The full response, or a stream with its first chunk: earlier errors get an HTTP status of their own."""
    (resources, context), limit_s = call, call.resources.limits.timeout_s
    own_id, usage = form.id_prefix + uuid.uuid4().hex, Usage(request.num_choices)
    head = {"id": own_id, "created": int(time.time()), "model": model.name}
    deltas = generate(
        resources.router,
        model,
        request,
        prompts,
        request_id=own_id,
        metadata=context.metadata(),
        timeout_s=min(request.timeout_s or limit_s, limit_s),
    )
    headers = {"x-request-id": own_id}
    if not request.is_stream:
        choices = await collect(deltas, len(prompts) * request.num_choices, usage)
        written = [form.choice(index, choice) for index, choice in enumerate(choices)]
        body = {**head, "object": form.object, "choices": written, "usage": usage.as_json()}
        return JSONResponse(body, headers=headers)

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        between = {"usage": None} if request.has_usage_chunk else {}
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                usage.add(delta)
                if delta.is_visible:
                    for choice in form.delta_choices(delta):
                        yield {**head, "object": form.chunk_object, "choices": [choice], **between}
        if request.has_usage_chunk:
            yield {**head, "object": form.chunk_object, "choices": [], "usage": usage.as_json()}

    return await event_stream(chunks(), context, resources.stopping, error_body=openai_body, headers=headers, end=DONE)
