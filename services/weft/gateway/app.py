"""The HTTP interface: routes and request handlers."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

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
from weft.gateway.json_text import is_large
from weft.gateway.openai import ENDPOINTS
from weft.gateway.openai.endpoint import Endpoint, EndpointCall
from weft.gateway.openai.models import Models
from weft.gateway.openai.text_request import TIMEOUT_HEADER
from weft.gateway.v2.errors import error_answer

MODELS = "/v1/models"
HEALTH = "/health"
#: How long the router has for a health check, in seconds.
HEALTH_TIMEOUT_S = 2.0
#: Prefixes of what runs in the background.
_BACKGROUND = ("/v1/files", "/v1/batches")


class Gateway:
    """Serves HTTP requests by calling the router; create it on the event loop that it runs on.

    Args:
        resources: Shared with the other interface, V2.
        models: The models behind the router.
        more_routes: Handlers of further routes, by method and path.
        endpoints: Of OpenAI's interface.
    """

    def __init__(
        self,
        resources: Resources,
        models: Models,
        more_routes: Sequence[tuple[str, str, Handler]] = (),
        endpoints: Sequence[Endpoint] = ENDPOINTS,
    ) -> None:
        self._resources = resources
        self._models = models
        self._more_routes = more_routes
        self._endpoints = endpoints
        self._kinds = tuple(dict.fromkeys(one.model_kind for one in endpoints))
        self._paths = frozenset((MODELS, HEALTH, *(one.path for one in endpoints)))
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application with all routes."""
        routes = [
            *(Route(one.path, endpoint(self._handler(one), _error), methods=["POST"]) for one in self._endpoints),
            Route(MODELS, endpoint(self._list, _error), methods=["GET"]),
            Route(MODELS + "/{name}", endpoint(self._model, _error), methods=["GET"]),
            Route(HEALTH, endpoint(self._health, _error), methods=["GET"]),
            *(Route(path, endpoint(handle, _error), methods=[method]) for method, path, handle in self._more_routes),
            *v2.routes(self._resources),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._unknown_route})
        app.router.redirect_slashes = False
        return app

    def endpoint_of(self, path: str) -> str:
        """Name of the endpoint of a path, for metrics and spans."""
        if path.startswith(_BACKGROUND):
            return next(prefix for prefix in _BACKGROUND if path.startswith(prefix))
        return path if path in self._paths else v2.endpoint_of(path) or "/other"

    def _handler(self, served: Endpoint) -> Handler:
        async def handle(request: Request, context: RequestContext) -> ASGIApp:
            body = await self._body(request, context)

            async def respond() -> ASGIApp:
                headers = {TIMEOUT_HEADER: context.headers.get(TIMEOUT_HEADER, "")}
                parsed = await self._resources.run(context, is_large(body), served.parse, body, headers)
                model = await self._models.find(served.model_kind, parsed.model, context.identity())
                return await served.respond(parsed, model, EndpointCall(self._resources, context))

            return await run_until_disconnect(request.receive, self._resources.stopping, respond())

        return handle

    async def _body(self, request: Request, context: RequestContext) -> bytes:
        """The body of a client with a valid key; the others get their error before anything of it is read."""
        check_content_type(request)
        limits = self._resources.limits
        return b"".join(await self._resources.body(request, context, min(limits.max_body_bytes, limits.max_json_bytes)))

    async def _list(self, _request: Request, context: RequestContext) -> ASGIApp:
        names = await self._models.names(self._kinds, context.identity())
        return JSONResponse({"object": "list", "data": [self._model_object(name) for name in names]})

    async def _model(self, request: Request, context: RequestContext) -> ASGIApp:
        name = request.path_params["name"]
        await self._models.check_listed(name, self._kinds, context.identity())
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

    async def _unknown_route(self, request: Request, error: Exception) -> Response:
        """Error response for an unknown path or method."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        is_v2 = bool(v2.endpoint_of(request.url.path))
        offered = "GET /v2/models/NAME and POST /v2/models/NAME/infer"
        if not is_v2:
            posts = " and ".join(f"POST {served.path}" for served in self._endpoints)
            offered = f"GET {MODELS}, {posts}, or {offered}"
            if request.url.path.startswith(_BACKGROUND):
                offered = "--batch-dir of the gateway, which turns files and batches on"
        what = f"{request.method} {request.url.path[:80]} is not offered; see {offered}"
        refused = RequestError(what, code="unknown_url", http_status=status)
        refusal = error_answer(refused) if is_v2 else _error(refused)
        refusal.headers.update(getattr(error, "headers", None) or {})
        return refusal


def _error(error: WeftError) -> JSONResponse:
    respond = error_response(error)
    return JSONResponse(respond.body, respond.status, respond.headers)
