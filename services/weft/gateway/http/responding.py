"""Turns handlers into ASGI endpoints: errors become responses, disconnects cancel work, events are streamed."""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import UnavailableError, WeftError
from weft.gateway.http.request_context import RequestContext, context_of

T = TypeVar("T")
Handler: TypeAlias = Callable[[Request, RequestContext], Awaitable[ASGIApp]]

DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientDisconnectedError(Exception):
    """The client closed the connection before the response."""


def endpoint(handle: Handler, error: Callable[[WeftError], Response]) -> Callable[..., Awaitable[ASGIApp]]:
    """Make an ASGI endpoint from a handler; ``error`` formats its errors."""

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


async def run_until_disconnect(receive: Receive, stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; cancel it if the client disconnects, or once ``stopping`` is set: the grace period is over.

    ``receive`` is that of a request whose body was read. ``work`` has ended in any case when this returns or raises.

    Raises:
        ClientDisconnectedError: The client disconnected first.
        UnavailableError: The gateway stops.
    """
    working = asyncio.create_task(work)
    disconnecting = asyncio.create_task(_disconnected(receive))
    ending = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((working, disconnecting, ending), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if disconnecting.done():
            disconnecting.result()  # raises if receiving failed
            raise ClientDisconnectedError
        raise UnavailableError("the gateway stops, and has no time left for this answer; ask again")
    finally:
        await cancel_and_wait((working, disconnecting, ending))
        del working  # it holds the error that is raised, whose traceback holds this frame


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def event_stream(
    events: AsyncGenerator[dict[str, Any], None],
    context: RequestContext,
    stopping: asyncio.Event,
    *,
    error_body: Callable[[WeftError], Mapping[str, Any]],
    end: bytes = b"",
    has_names: bool = False,
) -> ASGIApp:
    """Make a response of server-sent events, after awaiting the first one, so that earlier errors have a status.

    Backpressure: the source is read no faster than the client reads; a disconnect closes it. An error after the first
    event is sent as an event, ``error_body``, and ends the stream without ``end``. ``events`` are always closed; with
    ``has_names`` the name of each is its ``type``. ``context`` records how the stream ended, ``stopping`` is as of
    ``run_until_disconnect``.
    """
    write = _named_event if has_names else _event
    try:
        first = await anext(events, None)
    except BaseException:
        await events.aclose()
        raise

    async def send_all(send: Send) -> None:
        async with contextlib.aclosing(events):
            if first is not None:
                await send({"type": "http.response.body", "body": write(first), "more_body": True})
            async for one in events:
                await send({"type": "http.response.body", "body": write(one), "more_body": True})

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        raw = [(name.encode(), value.encode()) for name, value in _EVENT_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        last = end
        try:
            await run_until_disconnect(receive, stopping, send_all(send))
        except ClientDisconnectedError:
            context.record_disconnect()
            return
        except Exception as error:
            last = write(error_body(context.record_failure(error)))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    return respond


#: Characters of an array that are written before others have their turn on the event loop: about 1 ms of numbers.
_CHARS_AT_ONCE = 1 << 14


async def json_array_response(head: Mapping[str, Any], name: str, items: Iterable[Any]) -> Response:
    """A JSON object whose last field ``name`` is a long array, written bit by bit."""
    parts, num_chars = [f'{json.dumps(head, ensure_ascii=False)[:-1]}, "{name}": ['], 0
    for item in items:
        parts.append(f"{', ' if len(parts) > 1 else ''}{json.dumps(item, default=int)}")
        num_chars += len(parts[-1])
        if num_chars > _CHARS_AT_ONCE:
            num_chars = 0
            await asyncio.sleep(0)
    return Response("".join([*parts, "]}"]).encode(), media_type="application/json")


def _event(value: Mapping[str, Any]) -> bytes:
    """One event on one line; JSON contains no line breaks."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _named_event(value: Mapping[str, Any]) -> bytes:
    return f"event: {value['type']}\n".encode() + _event(value)
