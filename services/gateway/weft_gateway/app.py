"""The HTTP interface: routes, and what happens between a request and its answer."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft_common.client.v2_client import V2Client
from weft_common.errors import RemoteError, UnavailableError, WeftError
from weft_gateway.errors import RequestError, answer_of
from weft_gateway.http.body import read_json
from weft_gateway.http.calls import PendingCall, call_of
from weft_gateway.http.disconnect import ClientLeftError, unless_left
from weft_gateway.http.sse import EventStream
from weft_gateway.openai import chat, completions
from weft_gateway.openai.ask import Ask, Prompt
from weft_gateway.openai.generation import CollectedChoice, Usage, gather, generate
from weft_gateway.openai.models import Models
from weft_gateway.openai.pieces import Piece
from weft_gateway.openai.text_model import TextModel

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
HEALTH = "/health"
#: How long the router has for a health check, in seconds.
HEALTH_TIMEOUT_S = 2.0
ENDPOINTS = (COMPLETIONS, CHAT, MODELS, HEALTH)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may take.

    Attributes:
        max_body_bytes: Of its body.
        timeout_s: Longest time for an answer in seconds, whatever the request asks for.
    """

    max_body_bytes: int
    timeout_s: float


class Writer(Protocol):
    """Makes the answers to one request, whole or in chunks."""

    id: str

    def whole(self, choices: Sequence[CollectedChoice]) -> dict[str, Any]:
        """The answer as one object."""

    def chunks(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[dict[str, Any], None]:
        """The answer as a stream, which closes ``pieces``."""


class Gateway:
    """Answers HTTP requests by calls of the router; make it on the event loop that it runs on.

    Args:
        router: What is called.
        models: The models behind it.
        limits: Of each request.

    Attributes:
        stopping: Set it when what is in work has no time left: it then ends with UNAVAILABLE.
    """

    def __init__(self, router: V2Client, models: Models, limits: Limits) -> None:
        self.stopping = asyncio.Event()
        self._router = router
        self._models = models
        self._limits = limits
        self._created = int(time.time())
        self._is_draining = False

    def drain(self) -> None:
        """``/health`` says from now on that no more requests should come."""
        self._is_draining = True

    def app(self) -> Starlette:
        """The routes."""
        routes = [
            Route(COMPLETIONS, self._answering(self._completions), methods=["POST"]),
            Route(CHAT, self._answering(self._chat), methods=["POST"]),
            Route(MODELS, self._answering(self._list), methods=["GET"]),
            Route(MODELS + "/{name}", self._answering(self._model), methods=["GET"]),
            Route(HEALTH, self._answering(self._health), methods=["GET"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})
        app.router.redirect_slashes = False
        return app

    def _answering(
        self, handle: Callable[[Request, PendingCall], Awaitable[ASGIApp]]
    ) -> Callable[..., Awaitable[ASGIApp]]:
        """The endpoint, whose errors are answers, and which ends when its client leaves."""

        @functools.wraps(handle)
        async def endpoint(request: Request) -> ASGIApp:
            call = call_of(request.scope)
            try:
                return await handle(request, call)
            except (ClientLeftError, ClientDisconnect):
                call.left()
                return Response(status_code=499)  # nobody reads it; the count of requests shows it
            except Exception as error:
                return _error(call.failed(error))

        return endpoint

    async def _completions(self, request: Request, call: PendingCall) -> ASGIApp:
        body = await read_json(request, self._limits.max_body_bytes)
        asked = completions.parse(body, request.headers)

        async def answer() -> ASGIApp:
            model = await self._models.find(asked.ask.model, call.identity())
            usage = Usage(asked.ask.num_choices)
            writer = completions.CompletionWriter(model.name, usage, has_usage_chunk=asked.ask.has_usage_chunk)
            return await self._answer(call, model, asked.ask, asked.prompts, writer, usage)

        return await unless_left(request.receive, self.stopping, answer())

    async def _chat(self, request: Request, call: PendingCall) -> ASGIApp:
        body = await read_json(request, self._limits.max_body_bytes)
        asked = chat.parse(body, request.headers)

        async def answer() -> ASGIApp:
            model = await self._models.find(asked.ask.model, call.identity())
            prompt = await asked.prompt(model.template())
            usage = Usage(asked.ask.num_choices)
            writer = chat.ChatWriter(
                model.name,
                usage,
                num_top_logprobs=asked.ask.sampling.get("logprobs", 0),
                has_usage_chunk=asked.ask.has_usage_chunk,
            )
            return await self._answer(call, model, asked.ask, [prompt], writer, usage)

        return await unless_left(request.receive, self.stopping, answer())

    async def _answer(
        self, call: PendingCall, model: TextModel, ask: Ask, prompts: Sequence[Prompt], writer: Writer, usage: Usage
    ) -> ASGIApp:
        """The whole answer, or a stream that has begun: what fails before its first piece has a status of its own."""
        timeout_s = min(ask.timeout_s or self._limits.timeout_s, self._limits.timeout_s)
        pieces = generate(
            self._router,
            model,
            ask,
            prompts,
            request_id=writer.id,
            metadata=(*call.identity(), *call.trace()),
            timeout_s=timeout_s,
        )
        headers = {"x-request-id": writer.id}
        if not ask.is_stream:
            choices = await gather(pieces, len(prompts) * ask.num_choices, usage)
            return JSONResponse(writer.whole(choices), headers=headers)
        return EventStream(await _begun(writer.chunks(pieces)), call, self.stopping, headers)

    async def _list(self, _request: Request, call: PendingCall) -> ASGIApp:
        names = await self._models.names(call.identity())
        return JSONResponse({"object": "list", "data": [self._shown(name) for name in names]})

    async def _model(self, request: Request, call: PendingCall) -> ASGIApp:
        name = request.path_params["name"]
        await self._models.check_listed(name, call.identity())
        return JSONResponse(self._shown(name))

    async def _health(self, _request: Request, _call: PendingCall) -> ASGIApp:
        if self._is_draining:
            raise UnavailableError("the gateway stops")
        with contextlib.suppress(RemoteError):
            if await self._router.is_serving(timeout_s=HEALTH_TIMEOUT_S):
                return JSONResponse({"status": "ok"})
        raise UnavailableError("the router does not answer that it serves")

    def _shown(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "weft"}


async def _begun(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """The same chunks, the first of which has come. Raises what comes in its place; ``chunks`` is closed then."""
    try:
        first = await anext(chunks, None)
    except BaseException:
        await chunks.aclose()
        raise

    async def all_chunks() -> AsyncGenerator[dict[str, Any], None]:
        async with contextlib.aclosing(chunks):
            if first is not None:
                yield first
            async for chunk in chunks:
                yield chunk

    return all_chunks()


def _error(error: WeftError) -> JSONResponse:
    answer = answer_of(error)
    return JSONResponse(answer.body, answer.status, answer.headers)


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Of a path or a method that is not offered."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path[:80]}"
    message = f"{what} is not offered; see GET {MODELS}, POST {CHAT} and POST {COMPLETIONS}"
    headers = getattr(error, "headers", None)
    refusal = _error(RequestError(message, code="unknown_url", http_status=status))
    refusal.headers.update(headers or {})
    return refusal
