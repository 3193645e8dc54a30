"""Routes of ``/ui/``: pages and files without data, and the API that they read, as the key of the viewer allows."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from google.protobuf import text_format
from jinja2 import Template
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from weft import __version__
from weft.gateway.errors import RequestError, error_response, v2_body
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources, check_content_type
from weft.gateway.http.responding import Handler, endpoint, event_stream
from weft.gateway.json_text import parse_json
from weft.gateway.ui.live import Live, MetricPages
from weft.gateway.v2.routes import load_request, to_json, unload_request
from weft.v2.server.model_metrics import MetricsSource
from weft_protos import graph_service_pb2 as graph_pb

PREFIX = "/ui"
#: Of every response. Scripts, styles and data of this server alone; nothing inline, nothing around it.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; "
    "require-trusted-types-for 'script'; trusted-types picture",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
#: Header of every request that changes something; another site's page cannot send it without a preflight.
CHANGE_HEADER = "x-weft-ui"
_FOLDER = Path(__file__).parent
_CONTROL_TIMEOUT_S, _EXPLAIN_TIMEOUT_S = 120.0, 30.0
_MAX_BODY_BYTES = 1 << 20
#: Graphs that one viewer looks at; requests that are listed, and slow or failed ones besides.
_MAX_GRAPHS, _MAX_RECENT, _MAX_ASIDE = 8, 200, 50


def page_routes(resources: Resources, metrics: Sequence[MetricsSource], jaeger_url: str) -> list[Route]:
    """Routes of the page, which links to traces if there is a ``jaeger_url``."""
    return _Page(resources, {one.service or one.url: one.url for one in metrics}, jaeger_url).routes()


class _Page:
    def __init__(self, resources: Resources, addresses: dict[str, str], jaeger_url: str) -> None:
        self._resources = resources
        self._machine_pages = MetricPages(addresses)
        # A tick tells nothing of the router's page, which has megabytes with a thousand graphs.
        addresses = {name: url for name, url in addresses.items() if url != addresses.get("router")}
        self._live = Live(resources, MetricPages(addresses))
        self._explaining = asyncio.Semaphore(1)
        self._files = StaticFiles(directory=_FOLDER / "static")
        template = Template((_FOLDER / "templates/index.html").read_text(encoding="utf-8"), autoescape=True)
        self._html = template.render(version=__version__, jaeger_url=jaeger_url)

    def routes(self) -> list[Route]:
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "", self._index),
            ("GET", "/", self._index),
            ("GET", "/static/{name}", self._static),
            ("GET", "/api/live", self._events),
            ("GET", "/api/graphs/{name}", self._graph),
            ("GET", "/api/requests", self._requests),
            ("GET", "/api/requests/{key}", self._request),
            ("GET", "/api/machines", self._machines),
            ("POST", "/api/control", self._control),
            ("POST", "/api/explain", self._explain),
        ]
        respond = partial(error_response, body=v2_body)
        return [Route(PREFIX + path, endpoint(self._checked(one), respond), methods=[how]) for how, path, one in routes]

    def _checked(self, handle: Handler) -> Handler:
        async def checked(request: Request, context: RequestContext) -> ASGIApp:
            context.response_headers.update(HEADERS)
            if request.url.path.startswith(f"{PREFIX}/api/"):
                context.response_headers["cache-control"] = "no-store"
                _check_origin(request)
            return await handle(request, context)

        return checked

    async def _index(self, _request: Request, _context: RequestContext) -> ASGIApp:
        return HTMLResponse(self._html)

    async def _static(self, request: Request, context: RequestContext) -> ASGIApp:
        context.response_headers["cache-control"] = "no-cache"  # asked for again with its etag
        try:
            return await self._files.get_response(request.path_params["name"], request.scope)
        except HTTPException as error:
            raise RequestError("there is no such file", http_status=error.status_code) from error

    async def _events(self, request: Request, context: RequestContext) -> ASGIApp:
        graphs, identity = tuple(sorted(set(request.query_params.getlist("graph")))), context.identity()
        if len(graphs) > _MAX_GRAPHS:
            raise RequestError(f"{len(graphs)} graphs are asked for; at most {_MAX_GRAPHS} are shown at once")
        events = self._live.events(identity, graphs)
        return await event_stream(events, context, self._resources.stopping, error_body=v2_body, has_names=True)

    async def _graph(self, request: Request, context: RequestContext) -> ASGIApp:
        version = request.query_params.get("version", "")[:18]
        asked = graph_pb.GraphSourceRequest(
            graph=request.path_params["name"], version=int(version) if version.isdecimal() else 0
        )
        return JSONResponse(to_json(await self._live.ask("GraphPicture", asked, context.identity())))

    async def _requests(self, _request: Request, context: RequestContext) -> ASGIApp:
        asked = graph_pb.ObserveRequest(requests_after_unix_ms=0)
        seen = await self._live.ask("Observe", asked, context.identity())
        newest = [to_json(one) for one in sorted(seen.request, key=lambda one: -one.unix_ms)]
        slowest = sorted(newest, key=lambda one: -one["ms"])[:_MAX_ASIDE]
        failed = [one for one in newest if one["status"] != "OK"][:_MAX_ASIDE]
        return JSONResponse({"recent": newest[:_MAX_RECENT], "slowest": slowest, "failed": failed})

    async def _request(self, request: Request, context: RequestContext) -> ASGIApp:
        asked = graph_pb.ObserveRequest(request_key=request.path_params["key"])
        one, *mates = map(to_json, (await self._live.ask("Observe", asked, context.identity())).request)
        return JSONResponse({**one, "steps": json.loads(one["steps"]), "mates": mates})

    async def _machines(self, _request: Request, context: RequestContext) -> ASGIApp:
        seen = await self._live.ask("Observe", graph_pb.ObserveRequest(), context.identity())
        return JSONResponse(await self._machine_pages.tables({one.graph for one in seen.count}))

    async def _explain(self, request: Request, context: RequestContext) -> ASGIApp:
        body, identity = await self._body(request, context), context.identity()
        for field in ("inputs", "parameters", "headers"):
            if not isinstance(body.get(field) or {}, dict):
                raise RequestError(f"'{field}' must be an object, got {type(body[field]).__name__}", param=field)
        asked = graph_pb.GraphSourceRequest(graph=str(body.get("graph", "")))
        source = await self._live.ask("GraphSource", asked, identity)
        signatures = await self._live.ask("TargetSignatures", graph_pb.TargetSignaturesRequest(), identity)
        async with self._explaining:
            with TemporaryDirectory(prefix="weft-explain-") as folder:
                return JSONResponse({"text": await _explained(Path(folder), source, signatures, body)})

    async def _body(self, request: Request, context: RequestContext) -> dict[str, Any]:
        return parse_json(b"".join(await self._resources.body(request, context, _MAX_BODY_BYTES)))

    async def _control(self, request: Request, context: RequestContext) -> ASGIApp:
        body = await self._body(request, context)
        action, name, node = (str(body.get(field, "")) for field in ("action", "name", "node"))
        identity, call = context.identity(), partial(self._resources.router.call, timeout_s=_CONTROL_TIMEOUT_S)
        if action in ("pause", "resume", "promote", "abort"):
            change = graph_pb.RolloutRequest(
                action=graph_pb.RolloutRequest.Action.Value(action.upper()), graph=name, node=node
            )
            await self._live.ask("Rollout", change, identity)
        elif action == "unload":
            await call("RepositoryModelUnload", unload_request(name, {}), metadata=identity)
        elif action in ("load", "rollback"):
            parameters = {"rollback": True} if action == "rollback" else {}
            await call("RepositoryModelLoad", load_request(name, {"parameters": parameters}), metadata=identity)
        else:
            known = "load, unload, rollback, pause, resume, promote, abort"
            raise RequestError(f"'{action[:80]}' is no action; those are {known}", param="action")
        self._live.num_changes += 1
        return JSONResponse({"done": f"{action} of {name}"})


def _check_origin(request: Request) -> None:
    """Refuse what another site's page may have sent. Raises RequestError (403 or 415)."""
    headers = request.headers
    origin = headers.get("origin")
    is_own = headers.get("sec-fetch-site", "none") in ("same-origin", "none")
    is_own = is_own and (origin is None or urlsplit(origin).netloc == headers.get("host"))
    if request.method == "POST":
        check_content_type(request)
        is_own = is_own and headers.get(CHANGE_HEADER) == "1"
    if not is_own:
        raise RequestError(
            f"this is for the server's own page alone; changes need the header '{CHANGE_HEADER}: 1'", http_status=403
        )


async def _explained(
    folder: Path,
    source: graph_pb.GraphSourceResponse,
    signatures: graph_pb.TargetSignaturesResponse,
    body: dict[str, Any],
) -> str:
    """What ``weft explain`` says of what serves, in a process of its own, as it may take long. Raises RequestError."""
    lock = folder / "weft.lock"
    lock.write_text(text_format.MessageToString(graph_pb.SignatureLock(model=signatures.model)), encoding="utf-8")
    for one in source.graph:
        home, name = folder / "graphs" / one.graph, Path(one.file).name
        path = home / name if name == "config.pbtxt" else home / str(one.version) / name
        path.parent.mkdir(parents=True)
        path.write_bytes(one.text)
    arguments = [f"{source.graph[0].graph}/{source.graph[0].version}", f"--repository={folder}", f"--lock={lock}"]
    for number, (name, value) in enumerate(dict(body.get("inputs") or {}).items()):
        (folder / f"{number}.json").write_text(json.dumps(value), encoding="utf-8")
        arguments.append(f"--input={name}=@{folder / f'{number}.json'}")
    for option, field in (("param", "parameters"), ("header", "headers")):
        for name, value in dict(body.get(field) or {}).items():
            arguments.append(f"--{option}={name}={value if isinstance(value, str) else json.dumps(value)}")
    for name in ("priority", "remaining_ms"):
        if body.get(name) is not None:
            arguments.append(f"--{name.replace('_', '-')}={body[name]}")
    command = (sys.executable, "-P", "-m", "weft.cli", "explain", *arguments)
    try:
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    except (OSError, ValueError) as error:  # longer than arguments may be, or with a zero byte
        raise RequestError(f"the request cannot be explained: {error}") from error
    try:
        async with asyncio.timeout(_EXPLAIN_TIMEOUT_S):
            text, told = await process.communicate()
    except TimeoutError:
        raise RequestError(f"the request has too many ways to be followed within {_EXPLAIN_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RequestError(told.decode(errors="replace").strip())
    return text.decode()
