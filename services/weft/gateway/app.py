"""The HTTP interface: routes and request handlers."""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.base.errors import RemoteError, UnavailableError, WeftError
from weft.gateway import v2
from weft.gateway.errors import RequestError, error_response
from weft.gateway.http.body import check_content_type
from weft.gateway.http.disconnect import run_until_disconnect
from weft.gateway.http.endpoint import Handler, endpoint
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources
from weft.gateway.http.sse import DONE, EventStream, with_first
from weft.gateway.json_text import is_large
from weft.gateway.openai import chat, completions
from weft.gateway.openai.deltas import ChoiceDelta
from weft.gateway.openai.generate import CollectedChoice, Usage, collect, generate
from weft.gateway.openai.models import Models
from weft.gateway.openai.text_model import TextModel
from weft.gateway.openai.text_request import TIMEOUT_HEADER, Prompt, TextRequest
from weft.gateway.v2.errors import error_answer

Parsed = TypeVar("Parsed")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
HEALTH = "/health"
#: How long the router has for a health check, in seconds.
HEALTH_TIMEOUT_S = 2.0
#: Prefixes of what runs in the background.
_BACKGROUND = ("/v1/files", "/v1/batches")
_ENDPOINTS = frozenset((COMPLETIONS, CHAT, MODELS, HEALTH))


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
        resources: Shared with the other interface, V2.
        models: The models behind the router.
        more_routes: Handlers of further routes, by method and path.
    """

    def __init__(
        self, resources: Resources, models: Models, more_routes: Sequence[tuple[str, str, Handler]] = ()
    ) -> None:
        self._resources = resources
        self._models = models
        self._more_routes = more_routes
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application with all routes."""
        routes = [
            Route(COMPLETIONS, endpoint(self._completions, _error), methods=["POST"]),
            Route(CHAT, endpoint(self._chat, _error), methods=["POST"]),
            Route(MODELS, endpoint(self._list, _error), methods=["GET"]),
            Route(MODELS + "/{name}", endpoint(self._model, _error), methods=["GET"]),
            Route(HEALTH, endpoint(self._health, _error), methods=["GET"]),
            *(Route(path, endpoint(handle, _error), methods=[method]) for method, path, handle in self._more_routes),
            *v2.routes(self._resources),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_route})
        app.router.redirect_slashes = False
        return app

    async def _completions(self, request: Request, context: RequestContext) -> ASGIApp:
        body = await self._body(request, context)

        async def respond() -> ASGIApp:
            parsed = await self._parsed(completions.parse_bytes, body, context)
            model = await self._models.find(parsed.common.model, context.identity())
            usage = Usage(parsed.common.num_choices)
            writer = completions.CompletionWriter(model.name, usage, has_usage_chunk=parsed.common.has_usage_chunk)
            return await self._respond(context, model, parsed.common, parsed.prompts, writer, usage)

        return await run_until_disconnect(request.receive, self._resources.stopping, respond())

    async def _chat(self, request: Request, context: RequestContext) -> ASGIApp:
        body = await self._body(request, context)

        async def respond() -> ASGIApp:
            parsed = await self._parsed(chat.parse_bytes, body, context)
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

        return await run_until_disconnect(request.receive, self._resources.stopping, respond())

    async def _body(self, request: Request, context: RequestContext) -> bytes:
        """The body of a client with a valid key; the others get their error before anything of it is read."""
        check_content_type(request)
        limits = self._resources.limits
        return b"".join(await self._resources.body(request, context, min(limits.max_body_bytes, limits.max_json_bytes)))

    async def _parsed(
        self, parse: Callable[[bytes, Mapping[str, str]], Parsed], body: bytes, context: RequestContext
    ) -> Parsed:
        """The parsed body; a large one does not stall other requests."""
        headers = {TIMEOUT_HEADER: context.headers.get(TIMEOUT_HEADER, "")}
        return await self._resources.run(context, is_large(body), parse, body, headers)

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
        timeout_s = min(common.timeout_s or self._resources.limits.timeout_s, self._resources.limits.timeout_s)
        deltas = generate(
            self._resources.router,
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
        return EventStream(
            await with_first(writer.chunks(deltas)),
            context,
            self._resources.stopping,
            headers,
            error_body=lambda error: error_response(error).body,
            end=DONE,
        )

    async def _list(self, _request: Request, context: RequestContext) -> ASGIApp:
        names = await self._models.names(context.identity())
        return JSONResponse({"object": "list", "data": [self._model_object(name) for name in names]})

    async def _model(self, request: Request, context: RequestContext) -> ASGIApp:
        name = request.path_params["name"]
        await self._models.check_listed(name, context.identity())
        return JSONResponse(self._model_object(name))

    async def _health(self, _request: Request, _call: RequestContext) -> ASGIApp:
        if self._resources.is_draining:
            raise UnavailableError("the gateway stops")
        with contextlib.suppress(RemoteError):
            if await self._resources.router.is_serving(timeout_s=HEALTH_TIMEOUT_S):
                return JSONResponse({"status": "ok"})
        raise UnavailableError("the router does not report SERVING")

    def _model_object(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "weft"}


def endpoint_of(path: str) -> str:
    """Name of the endpoint of a path, for metrics and spans."""
    if path.startswith(_BACKGROUND):
        return next(prefix for prefix in _BACKGROUND if path.startswith(prefix))
    return path if path in _ENDPOINTS else v2.endpoint_of(path) or "/other"


def _error(error: WeftError) -> JSONResponse:
    respond = error_response(error)
    return JSONResponse(respond.body, respond.status, respond.headers)


async def _unknown_route(request: Request, error: Exception) -> Response:
    """Error response for an unknown path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path[:80]}"
    is_v2 = bool(v2.endpoint_of(request.url.path))
    offered = "GET /v2/models/NAME and POST /v2/models/NAME/infer"
    if not is_v2:
        offered = f"GET {MODELS}, POST {CHAT} and POST {COMPLETIONS}, or {offered}"
        if request.url.path.startswith(_BACKGROUND):
            offered = "--batch-dir of the gateway, which turns files and batches on"
    refused = RequestError(f"{what} is not offered; see {offered}", code="unknown_url", http_status=status)
    headers = getattr(error, "headers", None)
    refusal = error_answer(refused) if is_v2 else _error(refused)
    refusal.headers.update(headers or {})
    return refusal
