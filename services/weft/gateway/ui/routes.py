"""Routes of ``/ui/``: pages and files without data, and the API that they read, as the key of the viewer allows."""

import hashlib
import json
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft import __version__
from weft.base.errors import NotFoundError, WeftError
from weft.gateway.errors import RequestError, error_response, v2_body
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources, check_content_type
from weft.gateway.http.responding import Handler, endpoint, event_stream
from weft.gateway.json_text import parse_json
from weft.gateway.ui.live import DENIED, TIMEOUT_S, Feeds
from weft.gateway.ui.machines import MetricPages
from weft.gateway.v2.routes import load_request, to_json, unload_request
from weft.language.draw.formats import STYLE
from weft_protos import graph_service_pb2 as graph_pb

PREFIX = "/ui"
#: Of every response. Scripts, styles and data of this server alone; nothing inline, nothing around it.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
#: Header of every request that changes something; another site's page cannot send it without a preflight.
CHANGE_HEADER = "x-weft-ui"
_FOLDER = Path(__file__).parent
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9]+)*")
_MEDIA = {
    ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".png": "image/png", ".ico": "image/x-icon",
}  # fmt: skip
_CONTROL_TIMEOUT_S = 120.0
_MAX_BODY_BYTES = 1 << 20
#: Graphs that one viewer looks at; requests that are listed, and slow or failed ones besides.
MAX_GRAPHS, _MAX_RECENT, _MAX_ASIDE = 8, 200, 50


class Page:
    """The page of one gateway.

    Args:
        hosts: Names, besides addresses and localhost, by which a browser may call it.
        jaeger_url: Where traces are shown; "": nowhere.
    """

    def __init__(self, resources: Resources, pages: MetricPages, hosts: Collection[str], jaeger_url: str = "") -> None:
        self._resources = resources
        self._hosts = hosts
        self._feeds = Feeds(resources, pages)
        self._templates = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(_FOLDER / "templates"))
        self._templates.globals.update(version=__version__, jaeger_url=jaeger_url)

    def routes(self) -> list[Route]:
        """All of them."""
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/static/{name}", self._static),
            ("GET", "/api/state", self._state),
            ("GET", "/api/live", self._live),
            ("GET", "/api/graphs/{name}", self._graph),
            ("GET", "/api/requests", self._requests),
            ("GET", "/api/requests/{key}", self._request),
            ("GET", "/api/machines", self._machines),
            ("POST", "/api/control", self._control),
            ("GET", "/{view}", self._view),
            ("GET", "/", self._view),
            ("GET", "", self._view),
        ]
        respond = partial(error_response, body=v2_body)
        return [Route(PREFIX + path, endpoint(self._checked(one), respond), methods=[how]) for how, path, one in routes]

    def _checked(self, handle: Handler) -> Handler:
        async def checked(request: Request, context: RequestContext) -> ASGIApp:
            context.response_headers.update(HEADERS)
            if request.url.path.startswith(f"{PREFIX}/api/"):
                context.response_headers["cache-control"] = "no-store"
            context.check_host(self._hosts)
            if request.method == "POST":
                _check_change(request)
            return await handle(request, context)

        return checked

    async def _view(self, request: Request, _context: RequestContext) -> ASGIApp:
        name = request.path_params.get("view") or "index"
        if not _NAME.fullmatch(name) or not (_FOLDER / "templates" / f"{name}.html").is_file():
            raise NotFoundError(f"there is no page '{name[:80]}'; see {PREFIX}/")
        return HTMLResponse(self._templates.get_template(f"{name}.html").render(view=name))

    async def _static(self, request: Request, _context: RequestContext) -> ASGIApp:
        name = request.path_params["name"]
        path = _FOLDER / "static" / name
        if name == "graph.css":
            content = f".graph {{{STYLE}}}\n".encode()
        elif _NAME.fullmatch(name) and path.suffix in _MEDIA and path.is_file():
            content = path.read_bytes()
        else:
            raise NotFoundError(f"there is no file '{name[:80]}'")
        headers = {"etag": f'"{hashlib.sha256(content).hexdigest()[:20]}"', "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=_MEDIA[path.suffix], headers=headers)

    async def _state(self, _request: Request, context: RequestContext) -> ASGIApp:
        identity = context.identity()
        seen = await self._feeds.ask("Observe", graph_pb.ObserveRequest(), identity)
        return JSONResponse(await self._feeds.state(identity, seen))

    async def _live(self, request: Request, context: RequestContext) -> ASGIApp:
        graphs, identity = request.query_params.getlist("graph"), context.identity()
        if len(graphs) > MAX_GRAPHS:
            raise RequestError(f"{len(graphs)} graphs are asked for; at most {MAX_GRAPHS} are shown at once")
        try:
            await self._feeds.ask("Observe", graph_pb.ObserveRequest(), identity)
        except WeftError as error:
            if error.code in DENIED:  # else the stream tells that the router is down, and goes on when it is back
                raise
        events = self._feeds.events(identity, graphs)
        return await event_stream(events, context, self._resources.stopping, error_body=v2_body, has_names=True)

    async def _graph(self, request: Request, context: RequestContext) -> ASGIApp:
        version = request.query_params.get("version", "")
        if version and not (version.isdecimal() and len(version) < 19):
            raise RequestError(f"version '{version[:80]}' is no number")
        asked = graph_pb.GraphSourceRequest(graph=request.path_params["name"], version=int(version or 0))
        return JSONResponse(to_json(await self._feeds.ask("GraphPicture", asked, context.identity())))

    async def _requests(self, _request: Request, context: RequestContext) -> ASGIApp:
        asked = graph_pb.ObserveRequest(requests_after_unix_ms=0)
        seen = await self._feeds.ask("Observe", asked, context.identity())
        newest = [to_json(one) for one in sorted(seen.request, key=lambda one: -one.unix_ms)]
        slowest = sorted(newest, key=lambda one: -one["ms"])[:_MAX_ASIDE]
        failed = [one for one in newest if one["status"] != "OK"][:_MAX_ASIDE]
        return JSONResponse({"recent": newest[:_MAX_RECENT], "slowest": slowest, "failed": failed})

    async def _request(self, request: Request, context: RequestContext) -> ASGIApp:
        asked = graph_pb.ObserveRequest(request_key=request.path_params["key"])
        one = (await self._feeds.ask("Observe", asked, context.identity())).request[0]
        return JSONResponse({**to_json(one), "steps": json.loads(one.steps)})

    async def _machines(self, _request: Request, context: RequestContext) -> ASGIApp:
        identity = context.identity()
        await self._feeds.ask("Observe", graph_pb.ObserveRequest(), identity)  # for its right
        index = await self._resources.router.index(timeout_s=TIMEOUT_S, metadata=identity)
        return JSONResponse(self._feeds.pages.machines({one.name for one in index}))

    async def _control(self, request: Request, context: RequestContext) -> ASGIApp:
        body = parse_json(b"".join(await self._resources.body(request, context, _MAX_BODY_BYTES)))
        action, name, node = (str(body.get(field, "")) for field in ("action", "name", "node"))
        identity, call = context.identity(), partial(self._resources.router.call, timeout_s=_CONTROL_TIMEOUT_S)
        if action in ("pause", "resume", "promote", "abort"):
            change = graph_pb.RolloutRequest(action=action.upper(), graph=name, node=node)
            await self._feeds.ask("Rollout", change, identity)
        elif action == "unload":
            await call("RepositoryModelUnload", unload_request(name, {}), metadata=identity)
        elif action in ("load", "rollback"):
            parameters = {"rollback": True} if action == "rollback" else {}
            await call("RepositoryModelLoad", load_request(name, {"parameters": parameters}), metadata=identity)
        else:
            known = "load, unload, rollback, pause, resume, promote, abort"
            raise RequestError(f"'{action[:80]}' is no action; those are {known}", param="action")
        return JSONResponse({"done": f"{action} of {name}"})


def _check_change(request: Request) -> None:
    """Refuse what another site's page may have sent. Raises RequestError (403 or 415)."""
    check_content_type(request)
    headers = request.headers
    origin = headers.get("origin")
    is_own = origin is None or urlsplit(origin).netloc == headers.get("host")
    if headers.get(CHANGE_HEADER) != "1" or headers.get("sec-fetch-site", "same-origin") != "same-origin" or not is_own:
        raise RequestError(
            f"changes are taken from this server's own page alone, with the header '{CHANGE_HEADER}: 1'",
            http_status=403,
        )
