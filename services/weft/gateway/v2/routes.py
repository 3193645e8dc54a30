"""Paths of V2."""

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.gateway.http.body import check_origin
from weft.gateway.http.endpoint import Handler, endpoint
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources
from weft.gateway.v2.control import ControlHandlers
from weft.gateway.v2.errors import error_answer
from weft.gateway.v2.inference import InferenceHandlers

PREFIX = "/v2"
#: What metrics and spans tell apart.
_NAMED = ("infer", "generate", "generate_stream")


def routes(resources: Resources) -> list[Route]:
    """The routes, each with its handler."""
    control, inference = ControlHandlers(resources), InferenceHandlers(resources)
    model = "/models/{name}"
    versions = (model, model + "/versions/{version}")
    system, cuda = "/systemsharedmemory", "/cudasharedmemory"
    region = "/region/{region}"
    repository = "/repository"
    get: dict[str, Handler] = {
        "": control.server,
        "/health/live": control.live,
        "/health/ready": control.ready,
        "/models/stats": control.statistics,
        "/trace/setting": control.trace,
        model + "/trace/setting": control.trace,
        "/logging": control.log,
    }
    post: dict[str, Handler] = {
        "/trace/setting": control.trace,
        model + "/trace/setting": control.trace,
        "/logging": control.log,
        repository + "/index": control.index,
        repository + model + "/load": control.load,
        repository + model + "/unload": control.unload,
        system + region + "/register": control.system_register,
        cuda + region + "/register": control.cuda_register,
    }
    for one in versions:
        get |= {
            one: control.model,
            one + "/ready": control.model_ready,
            one + "/config": control.config,
            one + "/stats": control.statistics,
        }
        post |= {
            one + "/infer": inference.infer,
            one + "/generate": inference.generate,
            one + "/generate_stream": inference.generate_stream,
        }
    for place in ("", region):
        get |= {
            system + place + "/status": control.system_status,
            cuda + place + "/status": control.cuda_status,
        }
        post |= {
            system + place + "/unregister": control.system_unregister,
            cuda + place + "/unregister": control.cuda_unregister,
        }
    return [
        Route(PREFIX + path, endpoint(handle, error_answer), methods=[method])
        for method, handlers in (("GET", get), ("POST", {path: _checked(handle) for path, handle in post.items()}))
        for path, handle in handlers.items()
    ]


def _checked(handle: Handler) -> Handler:
    """The handler, for clients alone and pages of this origin."""

    async def checked(request: Request, context: RequestContext) -> ASGIApp:
        check_origin(request)
        return await handle(request, context)

    return checked


def endpoint_of(path: str) -> str:
    """Name of the endpoint of a path for metrics and spans; "": the path is none of V2."""
    if path != PREFIX and not path.startswith(PREFIX + "/"):
        return ""
    last = path.rpartition("/")[2]
    return f"{PREFIX}/{last}" if last in _NAMED else PREFIX
