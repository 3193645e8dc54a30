"""The connection of a channel: the sessions of ``sessions.txt``, which says what their lines mean."""

import ast
import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.wire.client.scripted import (
    ScriptedDialler,
    ScriptedServer,
    connected,
    failure,
    make_link,
    turns,
    until,
)
from tests.wire import peer
from tests.wire.notation import Case, frame_of, piece_of, read_cases, words

from weft.wire.client.channel import UnaryMethod
from weft.wire.client.link import Link


class Session:
    """A link in the course of one case."""

    def __init__(self, link: Link, dialler: ScriptedDialler) -> None:
        self._link = link
        self._dialler = dialler
        self._server: ScriptedServer | None = None
        self._calls: dict[str, Any] = {}
        self._sent: dict[ScriptedServer, list[peer.Frame]] = {}
        self._closing: asyncio.Future[None] | None = None

    async def play(self, line: str) -> None:
        """One line."""
        verb, *rest = words(line)
        text = line.partition(" ")[2]
        match verb:
            case "connect":
                settings = peer.Frame(peer.SETTINGS, 0, 0, b"".join(map(piece_of, rest))).settings
                self._server = await connected(self._link, self._dialler, settings)
            case "accept":
                self._dialler.accept()
            case "refuse":
                self._dialler.refuse(text)
            case "server":
                self._server = await self._dialler.server(int(rest[0]))
            case "call":
                keywords = {name: ast.literal_eval(value) for name, value in (word.split("=") for word in rest[2:])}
                self._calls[rest[0]] = self._begin(piece_of(rest[1]), **keywords)
            case "cancel":
                assert (True, False) == (self._calls[rest[0]].cancel(), self._calls[rest[0]].cancel())
            case "close":
                self._closing = asyncio.ensure_future(self._link.close(float(rest[0]) if rest else None))
            case "lose":
                self._peer.lose(ConnectionResetError(text))
            case ">":
                self._peer.send(frame_of(line[1:]))
            case "answer":
                self._peer.answer(int(rest[0]), piece_of(rest[1]))
            case _:
                await self._check(verb, rest, text)

    async def _check(self, verb: str, rest: list[str], text: str) -> None:
        match verb:
            case "=":
                await self._check_end(rest[0], rest[1], " ".join(rest[2:]))
            case "<":
                sent = frame_of(text)
                wanted = peer.Frame(sent[3], sent[4], int.from_bytes(sent[5:9], "big"), sent[9:])
                await until(lambda: any(frame.kind == wanted.kind for frame in self._frames()))
                first = next(frame for frame in self._frames() if frame.kind == wanted.kind)
                self._frames().remove(first)
                assert wanted == first
            case "opened":
                await turns()
                begun = [frame for frame in self._frames() if frame.kind == peer.HEADERS]
                assert [int(stream_id) for stream_id in rest] == [frame.stream_id for frame in begun]
                self._sent[self._peer] = [frame for frame in self._frames() if frame not in begun]
            case "pending":
                assert not self._calls[rest[0]].done()
            case "state":
                await until(lambda: self._link.connectivity.state.name == rest[0])
            case "attempts":
                await turns()
                assert int(rest[0]) == self._dialler.num_attempts
            case "closed" | "open":
                await turns()
                assert (verb == "closed") == self._peer.is_closed()
            case "closing":
                await turns()
                assert self._closing is not None
                assert not self._closing.done()
            case "usage":
                await turns()
                with pytest.raises(grpc.aio.UsageError, match="closed"):
                    self._begin(b"")
            case _:
                raise AssertionError(f"{verb} means nothing")

    async def _check_end(self, name: str, status: str, text: str) -> None:
        async with asyncio.timeout(10):
            if status == "OK":
                assert piece_of(text) == await self._calls[name]
            elif status == "CANCELLED":
                with pytest.raises(asyncio.CancelledError):
                    await self._calls[name]
            else:
                error = await failure(self._calls[name])
                assert status == error.code().name
                assert text in (error.details() or "")

    def _begin(self, request: bytes, **keywords: Any) -> Any:
        return UnaryMethod(self._link, "/a.B/C", None, None)(request, **keywords)

    @property
    def _peer(self) -> ScriptedServer:
        assert self._server is not None
        return self._server

    def _frames(self) -> list[peer.Frame]:
        """What the client has sent to the server and nobody has looked at."""
        found = self._sent.setdefault(self._peer, [])
        found += self._peer.frames()
        return found


@pytest.mark.parametrize("case", read_cases(Path(__file__).with_name("sessions.txt")), ids=lambda case: case.name)
async def test_session(case: Case, dialler: ScriptedDialler) -> None:
    """Client and servers do what the lines say, one after the other, and no task is left."""
    options = dict(word.split("=") for line in case.starting_with("options") for word in line.split())
    link = make_link(dialler, **{name: float(value) for name, value in options.items()})
    session = Session(link, dialler)
    for line in case.lines:
        if not line.startswith("options"):
            await session.play(line)
    await link.close(None)
    await turns()
    assert asyncio.all_tasks() == {asyncio.current_task()}
