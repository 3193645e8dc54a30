"""The HTTP interface: routes and request handlers."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft_common.client.v2_client import V2Client
from weft_common.errors import RemoteError, UnavailableError, WeftError
from weft_common.processes.malloc import give_back_freed_memory
from weft_gateway.errors import RequestError, error_response
from weft_gateway.http.body import BytesInWork, check_content_type, read_body
from weft_gateway.http.disconnect import ClientDisconnectedError, run_until_disconnect
from weft_gateway.http.key_check import KeyCheck
from weft_gateway.http.request_context import RequestContext, context_of
from weft_gateway.http.sse import EventStream
from weft_gateway.json_text import is_large
from weft_gateway.offload import Offload
from weft_gateway.openai import chat, completions
from weft_gateway.openai.deltas import ChoiceDelta
from weft_gateway.openai.generate import CollectedChoice, Usage, collect, generate
from weft_gateway.openai.models import Models
from weft_gateway.openai.text_model import TextModel
from weft_gateway.openai.text_request import TIMEOUT_HEADER, Prompt, TextRequest

Parsed = TypeVar("Parsed")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
HEALTH = "/health"
#: How long the router has for a health check, in seconds.
HEALTH_TIMEOUT_S = 2.0
_GIVE_BACK_AFTER_S = 0.2
ENDPOINTS = (COMPLETIONS, CHAT, MODELS, HEALTH)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request.

    Attributes:
        max_body_bytes: Size of its body.
        max_json_bytes: Size of its JSON.
        max_bytes_in_work: Size of the bodies of all requests in work.
        timeout_s: Longest response time in seconds, whatever the request asks for.
    """

    max_body_bytes: int
    max_json_bytes: int
    max_bytes_in_work: int
    timeout_s: float


class ResponseWriter(Protocol):
    """Formats the response to one request, as one object or in chunks."""

    id: str

    def full_response(self, choices: Sequence[CollectedChoice]) -> dict[str, Any]:
        """The response as one object."""

    def chunks(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[dict[str, Any], None]:
        """The response as a stream of objects; closes ``deltas``."""


class Gateway:
    """Serves HTTP requests by calling the router; create it on the event loop that it runs on.

    Args:
        router: Client of the router.
        models: The models behind it.
        limits: Limits of each request.

    Attributes:
        stopping: Set when the grace period is over: requests in flight then fail with UNAVAILABLE.
    """

    def __init__(self, router: V2Client, models: Models, limits: Limits) -> None:
        self.stopping = asyncio.Event()
        self._router = router
        self._models = models
        self._limits = limits
        self._keys = KeyCheck(router)
        self._offload = Offload()
        self._in_work = BytesInWork(limits.max_bytes_in_work, _give_back_memory)
        self._created = int(time.time())
        self._is_draining = False

    def drain(self) -> None:
        """Make ``/health`` fail, so that load balancers send no more requests."""
        self._is_draining = True

    def close(self) -> None:
        """End what still runs in processes of the gateway's own."""
        self._offload.close()

    def app(self) -> Starlette:
        """The ASGI application with all routes."""
        routes = [
            Route(COMPLETIONS, self._endpoint(self._completions), methods=["POST"]),
            Route(CHAT, self._endpoint(self._chat), methods=["POST"]),
            Route(MODELS, self._endpoint(self._list), methods=["GET"]),
            Route(MODELS + "/{name}", self._endpoint(self._model), methods=["GET"]),
            Route(HEALTH, self._endpoint(self._health), methods=["GET"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})
        app.router.redirect_slashes = False
        return app

    def _endpoint(
        self, handle: Callable[[Request, RequestContext], Awaitable[ASGIApp]]
    ) -> Callable[..., Awaitable[ASGIApp]]:
        """Wrap a handler: errors become responses, and a disconnect of the client ends the request."""

        @functools.wraps(handle)
        async def endpoint(request: Request) -> ASGIApp:
            context = context_of(request.scope)
            try:
                return await handle(request, context)
            except (ClientDisconnectedError, ClientDisconnect):
                context.record_disconnect()
                return Response(status_code=499)  # for the request metrics only, since the client is gone
            except Exception as error:
                return _error(context.record_failure(error))

        return endpoint

    async def _completions(self, request: Request, context: RequestContext) -> ASGIApp:
        body = await self._body(request, context)

        async def respond() -> ASGIApp:
            parsed = await self._parsed(completions.parse_bytes, body, request)
            model = await self._models.find(parsed.common.model, context.identity())
            usage = Usage(parsed.common.num_choices)
            writer = completions.CompletionWriter(model.name, usage, has_usage_chunk=parsed.common.has_usage_chunk)
            return await self._respond(context, model, parsed.common, parsed.prompts, writer, usage)

        return await run_until_disconnect(request.receive, self.stopping, respond())

    async def _chat(self, request: Request, context: RequestContext) -> ASGIApp:
        body = await self._body(request, context)

        async def respond() -> ASGIApp:
            parsed = await self._parsed(chat.parse_bytes, body, request)
            model = await self._models.find(parsed.common.model, context.identity())
            prompt = await parsed.prompt(model.template())
            usage = Usage(parsed.common.num_choices)
            writer = chat.ChatWriter(
                model.name,
                usage,
                num_top_logprobs=parsed.common.sampling.get("logprobs", 0),
                has_usage_chunk=parsed.common.has_usage_chunk,
            )
            return await self._respond(context, model, parsed.common, [prompt], writer, usage)

        return await run_until_disconnect(request.receive, self.stopping, respond())

    async def _body(self, request: Request, context: RequestContext) -> bytes:
        """The body of a client with a valid key; the others get their error before anything of it is read."""
        await self._keys.check(context.identity())
        check_content_type(request)
        max_bytes = min(self._limits.max_body_bytes, self._limits.max_json_bytes)
        return await read_body(request, context, self._in_work, max_bytes)

    async def _parsed(
        self, parse: Callable[[bytes, Mapping[str, str]], Parsed], body: bytes, request: Request
    ) -> Parsed:
        """The parsed body; a large one does not stall other requests."""
        headers = {TIMEOUT_HEADER: request.headers.get(TIMEOUT_HEADER, "")}
        if is_large(body):
            return await self._offload.run(parse, body, headers)
        return parse(body, headers)

    async def _respond(
        self,
        context: RequestContext,
        model: TextModel,
        common: TextRequest,
        prompts: Sequence[Prompt],
        writer: ResponseWriter,
        usage: Usage,
    ) -> ASGIApp:
        """The full response, or a stream with its first chunk: earlier errors get an HTTP status of their own."""
        timeout_s = min(common.timeout_s or self._limits.timeout_s, self._limits.timeout_s)
        deltas = generate(
            self._router,
            model,
            common,
            prompts,
            request_id=writer.id,
            metadata=(*context.identity(), *context.trace_metadata()),
            timeout_s=timeout_s,
        )
        headers = {"x-request-id": writer.id}
        if not common.is_stream:
            choices = await collect(deltas, len(prompts) * common.num_choices, usage)
            return JSONResponse(writer.full_response(choices), headers=headers)
        return EventStream(await _with_first(writer.chunks(deltas)), context, self.stopping, headers)

    async def _list(self, _request: Request, context: RequestContext) -> ASGIApp:
        names = await self._models.names(context.identity())
        return JSONResponse({"object": "list", "data": [self._model_object(name) for name in names]})

    async def _model(self, request: Request, context: RequestContext) -> ASGIApp:
        name = request.path_params["name"]
        await self._models.check_listed(name, context.identity())
        return JSONResponse(self._model_object(name))

    async def _health(self, _request: Request, _call: RequestContext) -> ASGIApp:
        if self._is_draining:
            raise UnavailableError("the gateway stops")
        with contextlib.suppress(RemoteError):
            if await self._router.is_serving(timeout_s=HEALTH_TIMEOUT_S):
                return JSONResponse({"status": "ok"})
        raise UnavailableError("the router does not report SERVING")

    def _model_object(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "weft"}


def _give_back_memory() -> None:
    """Soon, when the last body is freed too; on a thread, since it takes milliseconds."""
    loop = asyncio.get_running_loop()
    loop.call_later(_GIVE_BACK_AFTER_S, loop.run_in_executor, None, give_back_freed_memory)


async def _with_first(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """Wait for the first chunk, then return an iterator over all. On an error, close ``chunks`` and raise it."""
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
    respond = error_response(error)
    return JSONResponse(respond.body, respond.status, respond.headers)


async def _unknown_route(request: Request, error: Exception) -> Response:
    """Error response for an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path[:80]}"
    message = f"{what} is not offered; see GET {MODELS}, POST {CHAT} and POST {COMPLETIONS}"
    headers = getattr(error, "headers", None)
    refusal = _error(RequestError(message, code="unknown_url", http_status=status))
    refusal.headers.update(headers or {})
    return refusal
