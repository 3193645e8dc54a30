"""Server-sent events: ``data: {...}`` per object."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from weft.base.errors import WeftError
from weft.gateway.http.disconnect import ClientDisconnectedError, run_until_disconnect
from weft.gateway.http.request_context import RequestContext

DONE = b"data: [DONE]\n\n"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream:
    """A stream of events. Backpressure: the source is read no faster than the client reads; a disconnect closes it.

    An error after the first event is sent as an event, ``data: {"error": ...}``, and ends the stream without ``end``.

    Args:
        events: Objects to send; always closed.
        context: Records how the stream ended.
        stopping: Set when the grace period is over.
        headers: Additional response headers.
        error_body: Formats an error.
        end: What follows the last event.
    """

    def __init__(
        self,
        events: AsyncGenerator[Mapping[str, Any], None],
        context: RequestContext,
        stopping: asyncio.Event,
        headers: Mapping[str, str],
        *,
        error_body: Callable[[WeftError], Mapping[str, Any]],
        end: bytes,
    ) -> None:
        self._headers = [(name.encode(), value.encode()) for name, value in {**headers, **_HEADERS}.items()]
        self._events = events
        self._context = context
        self._stopping = stopping
        self._error_body = error_body
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; returns when all are sent or the client has disconnected."""
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        last = self._end
        try:
            await run_until_disconnect(receive, self._stopping, self._send_all(send))
        except ClientDisconnectedError:
            self._context.record_disconnect()
            return
        except Exception as error:
            last = event(self._error_body(self._context.record_failure(error)))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            async for one in self._events:
                await send({"type": "http.response.body", "body": event(one), "more_body": True})


def event(value: Mapping[str, Any]) -> bytes:
    """One event on one line; JSON contains no line breaks."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def with_first(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
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
