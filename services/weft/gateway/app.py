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

from weft.base.errors import RemoteError, UnavailableError
from weft.gateway.errors import RequestError, error_response, v2_body
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources, check_content_type
from weft.gateway.http.responding import Handler, endpoint, run_until_disconnect
from weft.gateway.json_text import is_large
from weft.gateway.openai import ENDPOINTS
from weft.gateway.openai.endpoint import Endpoint, EndpointCall, Models
from weft.gateway.openai.text_request import TIMEOUT_HEADER
from weft.gateway.v2 import routes as v2

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
        handlers = (
            *(("POST", one.path, self._handler(one)) for one in self._endpoints),
            ("GET", MODELS, self._list),
            ("GET", MODELS + "/{name}", self._model),
            ("GET", HEALTH, self._health),
            *self._more_routes,
        )
        routes = [Route(path, endpoint(handle, error_response), methods=[method]) for method, path, handle in handlers]
        app = Starlette(
            routes=[*routes, *v2.routes(self._resources)], exception_handlers={HTTPException: self._unknown_route}
        )
        app.router.redirect_slashes = False
        return app

    def endpoint_of(self, path: str) -> str:
        """Name of the endpoint of a path, for metrics and spans."""
        if path.startswith(_BACKGROUND):
            return next(prefix for prefix in _BACKGROUND if path.startswith(prefix))
        return path if path in self._paths else v2.endpoint_of(path) or "/other"

    def _handler(self, served: Endpoint) -> Handler:
        async def handle(request: Request, context: RequestContext) -> ASGIApp:
            check_content_type(request)
            limits = self._resources.limits
            max_bytes = min(limits.max_body_bytes, limits.max_json_bytes)
            body = b"".join(await self._resources.body(request, context, max_bytes))

            async def respond() -> ASGIApp:
                headers = {TIMEOUT_HEADER: context.headers.get(TIMEOUT_HEADER, "")}
                parsed = await self._resources.run(context, is_large(body), served.parse, body, headers)
                model = await self._models.find(served.model_kind, parsed.model, context.identity())
                return await served.respond(parsed, model, EndpointCall(self._resources, context))

            return await run_until_disconnect(request.receive, self._resources.stopping, respond())

        return handle

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
        refusal = error_response(refused, v2_body) if is_v2 else error_response(refused)
        refusal.headers.update(getattr(error, "headers", None) or {})
        return refusal
