"""Takes part in the rollouts of a group of routers: tells counts, follows the shared state, decides as its owner."""

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.observing.logs import get_logger
from weft.language.rollouts import GuardPlan, RolloutPlan
from weft.router.rollouts.counts import ArmCounts
from weft.router.rollouts.folder import FolderState
from weft.router.rollouts.lease import KubernetesApi, LeaseState
from weft.router.rollouts.machine import PAUSED, PROMOTED, RUNNING, RolloutState, advance, apply
from weft.router.rollouts.shared import Document, Json, SharedState
from weft.router.rollouts.store import Rollout, RolloutStore

#: Rollouts that are remembered when no graph has them any more, by a router and in the shared state.
MAX_KEPT = 100
_LEASE = re.compile(r"lease:([a-z0-9-]+)/([a-z0-9-]+)(?:@(https?://.+))?")
_OPEN = (RUNNING, PAUSED)

_log = get_logger("weft.router.rollouts")


def place_of(where: str, repository: Path, state_dir: Path | None) -> str:
    """The value of ``--rollouts``, or what it means if it is not given.

    That is the folder ``.weft/rollouts`` of the repository if it can be written, else one in ``state_dir``, else "off".
    """
    if where:
        return where
    if os.access(repository, os.W_OK):
        return str(repository / ".weft" / "rollouts")
    if state_dir is not None:
        return str(state_dir / "rollouts")
    _log.info("%s cannot be written: rollouts are forgotten at the end, unless --rollouts says where", repository)
    return "off"


def shared_state(place: str) -> SharedState:
    """What a folder, ``lease:NAMESPACE/NAME[@URL]``, or "off", a temporary folder of this process, has.

    Raises InvalidArgumentError.
    """
    host = re.sub("[^a-z0-9-]", "-", socket.gethostname().lower())[:40].strip("-") or "router"
    member = f"{host}-{uuid4().hex[:8]}"
    if not place.startswith("lease:"):
        return FolderState(None if place == "off" else Path(place), member)
    if (found := _LEASE.fullmatch(place)) is None:
        raise InvalidArgumentError(
            f"--rollouts '{place}' is not of the form lease:NAMESPACE/NAME, names of lower-case letters, digits, '-'"
        )
    return LeaseState(KubernetesApi(found[3] or ""), found[1], found[2], member)


class KnownRollout(NamedTuple):
    """A rollout with the counts of the whole group, those of the candidate and of the baseline.

    Attributes:
        verdict: Of its state, or what it waits for by these counts.
    """

    rollout: Rollout
    counts: Sequence[ArmCounts]
    verdict: str
    owner: str


class RolloutMember:
    """This router in its group.

    Args:
        clock_ns: Unix time.
    """

    def __init__(self, store: RolloutStore, shared: SharedState, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._store, self._shared, self._clock_ns = store, shared, clock_ns
        self._lock = asyncio.Lock()
        self._known: dict[str, Rollout] = {}  # referenced, so that a reload continues their counts
        self._told: Json = {}
        self._failure = ""
        self._following: asyncio.Task[None] | None = None

    @property
    def rollouts(self) -> list[Rollout]:
        """Those of the loaded graphs, and the latest that were before them; for any thread."""
        return list(self._known.values())

    async def start(self) -> None:
        """Read the shared state, before graphs load, and follow it from now on."""
        await self._try(self._read)
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Tell the last counts, and leave the decisions to another member."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
        await self._try(self.look)
        await asyncio.to_thread(self._shared.close)

    async def look(self) -> None:
        """Tell, decide if this member is the owner, and follow. Raises OSError."""
        async with self._lock:
            own = self._own()
            self._take(await asyncio.to_thread(self._exchange, own))

    async def act(self, rollout: Rollout, action: str, who: str) -> None:
        """Do what a client says, as ``apply`` does. Raises InvalidArgumentError or UnavailableError."""
        async with self._lock, _told_as_unavailable():
            own = self._own(rollout)

            def act() -> Document:
                self._exchange(own)
                counts = self._shared.counts()
                return self._shared.change(lambda document: edit(document.rollouts[rollout.key], counts))

            def edit(entry: Json, counts: Mapping[str, Json]) -> bool:
                state, arms = RolloutState.from_json(entry["state"]), _sums(rollout.key, entry, counts)
                _put(entry, apply(action, rollout.plan, state, *arms, self._clock_ns(), who), arms)
                return True

            self._take(await asyncio.to_thread(act))
        _report(rollout.graph, rollout.node, rollout.plan.candidate, rollout.state)

    async def status(self, rollouts: Sequence[Rollout]) -> list[KnownRollout]:
        """These over the whole group. Raises UnavailableError."""
        async with self._lock, _told_as_unavailable():
            document = await asyncio.to_thread(self._exchange, self._own(*rollouts))
            counts = await asyncio.to_thread(self._shared.counts) if rollouts else {}
            self._take(document)
        found = []
        for one in rollouts:
            arms = _sums(one.key, document.rollouts[one.key], counts)
            after = advance(one.plan, one.state, *arms, self._clock_ns())
            verdict = (one.state if after.revision > one.state.revision else after).verdict
            found.append(KnownRollout(one, arms, verdict, document.owner))
        return found

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._shared.period_s)
            await self._try(self.look)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        """A failure is logged once, and the work is done again at the next look."""
        try:
            await work()
            self._failure = ""
        except Exception as error:
            if self._failure != str(error):
                self._failure = str(error)
                fault = None if isinstance(error, OSError) else error
                _log.error("rollouts stay as they are, their shared state fails: %s", error, exc_info=fault)

    async def _read(self) -> None:
        self._take(await asyncio.to_thread(self._shared.read))

    def _own(self, *more: Rollout) -> dict[str, Json]:
        """What this member knows of ``more`` and of the rollouts that are not over."""
        self._known |= {one.key: one for one in self._store}
        for key in list(self._known)[:-MAX_KEPT]:
            del self._known[key]
        return {
            one.key: {
                "graph": one.graph,
                "node": one.node,
                "plan": asdict(one.plan),
                "state": one.state.to_json(),
                "counts": [one.candidate.to_json(), one.baseline.to_json()],
            }
            for one in (*self._known.values(), *more)
            if one.state.phase in _OPEN or one in more
        }

    def _take(self, document: Document) -> None:
        self._store.states = {key: RolloutState.from_json(entry["state"]) for key, entry in document.rollouts.items()}
        for key, state in self._store.states.items():
            if key in self._known:
                self._known[key].follow(state)

    def _exchange(self, own: Mapping[str, Json]) -> Document:
        """Tell the counts of own rollouts, all of which are in the document that is returned; runs on a thread."""
        document = self._shared.read()
        if not own and not any(map(_is_open, document.rollouts.values())):
            return document
        owner = self._shared.own()
        if any(_is_behind(document, key, entry) for key, entry in own.items()):
            document = self._shared.change(lambda found: _add(found, own, self._clock_ns()))
        counts = {key: entry["counts"] for key, entry in own.items()}
        if counts != self._told:
            self._shared.tell(counts)
            self._told = counts
        if owner == self._shared.member:
            document = self._decide()
        document.owner = owner
        return document

    def _decide(self) -> Document:
        counts = self._shared.counts()
        changed: list[Json] = []

        def edit(document: Document) -> bool:
            changed.clear()
            if document.owner == self._shared.member:
                for key, entry in document.rollouts.items():
                    state, arms = RolloutState.from_json(entry["state"]), _sums(key, entry, counts)
                    after = advance(_plan(entry["plan"]), state, *arms, self._clock_ns()) if _is_open(entry) else state
                    if after.revision != state.revision:
                        _put(entry, after, arms)
                        changed.append(entry)
            return bool(changed)

        document = self._shared.change(edit)
        for entry in changed:
            state = RolloutState.from_json(entry["state"])
            _report(entry["graph"], entry["node"], entry["plan"]["candidate"], state)
        needed = {key for key, entry in document.rollouts.items() if _is_open(entry)}
        self._shared.drop(member for member, told in counts.items() if not needed & told.keys())
        return document


@contextlib.asynccontextmanager
async def _told_as_unavailable():
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"the shared state of rollouts fails, try again: {error}") from error


def _report(graph: str, node: str, candidate: str, state: RolloutState) -> None:
    log = _log.info if state.phase in (RUNNING, PROMOTED) else _log.warning
    text = "rollout of '%s' in graph '%s', node '%s', revision %d: %s: %s"
    log(text, candidate, graph, node, state.revision, state.phase, state.verdict)


def _plan(content: Json) -> RolloutPlan:
    sequences = {name: tuple(content[name]) for name in ("weights", "shares")}
    return RolloutPlan(**{**content, **sequences, "guard": GuardPlan(**content["guard"])})


def _is_open(entry: Json) -> bool:
    return entry["state"]["phase"] in _OPEN


def _is_behind(document: Document, key: str, own: Json) -> bool:
    """Whether the document lacks what this member knows, as after damage."""
    found = document.rollouts.get(key)
    return found is None or found["state"]["revision"] < own["state"]["revision"]


def _add(document: Document, own: Mapping[str, Json], now_unix_ns: int) -> bool:
    news = {key: {**entry, "counts": []} for key, entry in own.items() if _is_behind(document, key, entry)}
    for entry in news.values():
        entry["state"]["changed_unix_ns"] = entry["state"]["changed_unix_ns"] or now_unix_ns
    document.rollouts |= news
    for key in sorted(document.rollouts, key=lambda key: document.rollouts[key]["state"]["changed_unix_ns"])[:-MAX_KEPT]:
        del document.rollouts[key]
    return bool(news)


def _put(entry: Json, state: RolloutState, arms: Sequence[ArmCounts]) -> None:
    entry |= {"state": state.to_json(), "counts": [arm.to_json() for arm in arms]}


def _sums(key: str, entry: Json, counts: Mapping[str, Json]) -> list[ArmCounts]:
    """Counts of both sides over all members; of a rollout that is over, those that it ended with."""
    told = [one[key] for one in counts.values() if key in one] if _is_open(entry) else [entry["counts"]]
    return [sum((ArmCounts.from_json(arms[side]) for arms in told if arms), ArmCounts()) for side in (0, 1)]
