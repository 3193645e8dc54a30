"""How an endpoint writes an answer, whole or as a stream; and OpenAI's form of it, of choices and chunks."""

import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from starlette.responses import JSONResponse
from starlette.types import ASGIApp
from typing_extensions import override

from weft.base.errors import WeftError
from weft.gateway.errors import openai_body
from weft.gateway.http.responding import DONE, event_stream
from weft.gateway.openai.endpoint import EndpointCall
from weft.gateway.openai.generate import ChoiceDelta, CollectedChoice, Usage, collect, generate
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import TextRequest

Event: TypeAlias = dict[str, Any]


class AnswerWriter(ABC):
    """Writes the answer to one request, by ``body`` or ``events``, which close ``deltas`` and raise its errors.

    Attributes:
        id: Of the answer, and of the model's request.
        id_header: Response header with it.
        end: What follows the last event of a stream.
        has_names: Whether the events have names: their ``type``.
    """

    id_header: ClassVar[str] = "x-request-id"
    end: ClassVar[bytes] = b""
    has_names: ClassVar[bool] = False

    def __init__(self, id_prefix: str) -> None:
        self.id = id_prefix + uuid.uuid4().hex

    @abstractmethod
    async def body(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def events(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[Event, None]:
        """The events of a stream."""

    @abstractmethod
    def error_body(self, error: WeftError) -> dict[str, Any]:
        """The event of an error in a stream."""


async def respond(
    call: EndpointCall,
    model: TextModel,
    request: TextRequest,
    writer: AnswerWriter,
    *,
    is_stream: bool | None = None,
) -> ASGIApp:
    """The full answer, or a stream after its first event, so that earlier errors have an HTTP status.

    ``is_stream`` says which, if the model is to answer otherwise than the endpoint does.
    """
    resources, context = call
    context.response_headers[writer.id_header] = writer.id
    deltas = generate(
        resources.router,
        model,
        request,
        request_id=writer.id,
        metadata=context.metadata(),
        timeout_s=call.timeout_s(request.timeout_s),
    )
    if not (request.is_stream if is_stream is None else is_stream):
        return JSONResponse(await writer.body(deltas))
    return await event_stream(
        writer.events(deltas),
        context,
        resources.stopping,
        error_body=writer.error_body,
        end=writer.end,
        has_names=writer.has_names,
    )


class ResponseForm(NamedTuple):
    """Response format of an endpoint with choices.

    Attributes:
        object, chunk_object: Type of a response, and of a chunk of one.
        choice: A complete choice as JSON, given its index.
        delta_choices: The one-element list of choices in the chunks for a delta.
        rest: Further fields of a response.
    """

    id_prefix: str
    object: str
    chunk_object: str
    choice: Callable[[int, CollectedChoice], dict[str, Any]]
    delta_choices: Callable[[ChoiceDelta], Iterable[dict[str, Any]]]
    rest: Callable[[Sequence[CollectedChoice]], dict[str, Any]] = lambda choices: {}


class ChoiceWriter(AnswerWriter):
    """Choices, whole or in chunks."""

    end: ClassVar[bytes] = DONE

    def __init__(self, model: TextModel, request: TextRequest, form: ResponseForm) -> None:
        super().__init__(form.id_prefix)
        self._request = request
        self._num_choices = len(request.prompts) * request.num_choices
        self._form = form
        self._usage = Usage(request.num_choices)
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": model.fingerprint,
        }

    @override
    async def body(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> dict[str, Any]:
        choices = await collect(deltas, self._num_choices, self._usage)
        written = [self._form.choice(index, choice) for index, choice in enumerate(choices)]
        body = {**self._head, "object": self._form.object, "choices": written, "usage": self._usage.as_json()}
        return body | self._form.rest(choices)

    @override
    async def events(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[Event, None]:
        has_usage, usage = self._request.has_usage_chunk, self._usage
        head = {**self._head, "object": self._form.chunk_object}
        between: dict[str, Any] = {"usage": None} if has_usage else {}
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                usage.add(delta)
                if self._request.has_continuous_usage:
                    between = {"usage": usage.as_json()}
                if delta.is_visible:
                    for choice in self._form.delta_choices(delta):
                        yield {**head, "choices": [choice], **between}
        if has_usage:
            yield {**head, "choices": [], "usage": usage.as_json()}

    @override
    def error_body(self, error: WeftError) -> dict[str, Any]:
        return openai_body(error)


async def text_response(call: EndpointCall, model: TextModel, request: TextRequest, form: ResponseForm) -> ASGIApp:
    """The answer as choices or chunks of them: see ``respond``."""
    return await respond(call, model, request, ChoiceWriter(model, request, form))
