"""Handlers as endpoints: their errors become responses, and a disconnect of the client ends them."""

import functools
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from weft.base.errors import WeftError
from weft.gateway.http.disconnect import ClientDisconnectedError
from weft.gateway.http.request_context import RequestContext, context_of

Handler: TypeAlias = Callable[[Request, RequestContext], Awaitable[ASGIApp]]


def endpoint(handle: Handler, error: Callable[[WeftError], Response]) -> Callable[..., Awaitable[ASGIApp]]:
    """The endpoint of a handler; ``error`` formats its errors."""

    @functools.wraps(handle)
    async def respond(request: Request) -> ASGIApp:
        context = context_of(request.scope)
        try:
            context.check_host()
            return await handle(request, context)
        except (ClientDisconnectedError, ClientDisconnect):
            context.record_disconnect()
            return Response(status_code=499)  # for the request metrics only, since the client is gone
        except Exception as failure:
            return error(context.record_failure(failure))

    return respond
