"""Answers as server-sent events: ``data: {...}`` for each piece, ``data: [DONE]`` at the end."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from weft_gateway.errors import answer_of
from weft_gateway.http.calls import PendingCall
from weft_gateway.http.disconnect import ClientLeftError, unless_left

DONE = b"data: [DONE]\n\n"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream:
    """A stream of events; the source is read no faster than the client reads, and closed when the client leaves.

    An error after the first event is an event of its own, ``data: {"error": ...}``, and ends the stream without
    ``[DONE]``.

    Args:
        events: Objects to send; closed in any case.
        call: Is told how the stream ended.
        stopping: Set when what is in work has no time left.
        headers: Beside those of every stream.
    """

    def __init__(
        self,
        events: AsyncGenerator[Mapping[str, Any], None],
        call: PendingCall,
        stopping: asyncio.Event,
        headers: Mapping[str, str],
    ) -> None:
        self._headers = [(name.encode(), value.encode()) for name, value in {**headers, **_HEADERS}.items()]
        self._events = events
        self._call = call
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; returns when all is sent or the client has left."""
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        last = DONE
        try:
            await unless_left(receive, self._stopping, self._send_all(send))
        except ClientLeftError:
            self._call.left()
            return
        except Exception as error:
            last = event(answer_of(self._call.failed(error)).body)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            async for one in self._events:
                await send({"type": "http.response.body", "body": event(one), "more_body": True})


def event(value: Mapping[str, Any]) -> bytes:
    """One event; JSON has no line breaks, so one line holds it."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
