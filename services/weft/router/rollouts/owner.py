"""Takes part in the rollouts of a group of routers: tells counts, follows the shared state, decides as its owner."""

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from weft.base.errors import UnavailableError
from weft.base.observing.logs import get_logger
from weft.router.rollouts.counts import ArmCounts
from weft.router.rollouts.folder import FolderState
from weft.router.rollouts.lease import LeaseState
from weft.router.rollouts.machine import PROMOTED, RUNNING, advance, apply
from weft.router.rollouts.place import LEASE
from weft.router.rollouts.shared import Document, Json, Ownership, SharedState, is_open, plan_of, state_of
from weft.router.rollouts.store import Rollout, RolloutStore

#: After how many periods all members follow a decision, and two looks more, as one that has just begun reads too early.
_SETTLED = 1.5
#: Rollouts that are remembered when no graph has them any more, by a router and in the shared state.
MAX_KEPT = 50

_log = get_logger("weft.router.rollouts")


def shared_state(place: str) -> SharedState:
    """What a folder, ``LEASE``, or "off", a temporary folder of this process, has."""
    member = f"{re.sub('[^a-z0-9]+', '-', socket.gethostname().lower())[:40]}-{uuid4().hex[:8]}"
    if found := LEASE.fullmatch(place):
        return LeaseState(found[1], found[2], Ownership(member, duration_s=15), url=found[3] or "")
    return FolderState(None if place == "off" else Path(place), Ownership(member, duration_s=2))


class RolloutMember:
    """This router in its group.

    Args:
        clock_ns: Unix time.

    Attributes:
        rollouts: By key: those of the loaded graphs, and the latest before, so that a reload continues their counts.
    """

    def __init__(self, store: RolloutStore, shared: SharedState, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._store, self._shared, self._clock_ns = store, shared, clock_ns
        self._lock = asyncio.Lock()
        self.rollouts: dict[str, Rollout] = {}
        self._decided: list[str] = []  # in the last edit
        self._told: Json = {}
        self._look_s = 0.0  # of the slowest one; it fades
        self._failure = ""
        self._following: asyncio.Task[None] | None = None

    @property
    def known(self) -> list[Rollout]:
        """As ``rollouts``, with those of graphs that were loaded since the last look."""
        return list((self.rollouts | {one.key: one for one in self._store}).values())

    async def start(self) -> None:
        """Read the shared state, before graphs load, and follow it from now on."""
        await self._try_to_look()
        self._following = asyncio.create_task(self._follow())

    def hold(self) -> None:
        """Look no more by itself: shares stay as they are."""
        if self._following is not None:
            self._following.cancel()

    async def close(self) -> None:
        """Tell the last counts, and leave the decisions to another member."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
        await self._try_to_look()
        await asyncio.to_thread(self._shared.close)

    async def look(self, *rollouts: Rollout, action: str = "", who: str = "") -> Document:
        """Tell counts, decide if this member is the owner, follow; or do an action of a client, as ``apply`` does.

        Returns the document, which has ``rollouts``; an action is for the first of them. Raises InvalidArgumentError or
        UnavailableError.
        """
        async with self._lock:
            self.rollouts |= (loaded := {one.key: one for one in (*self._store, *rollouts)})
            for key in [key for key in self.rollouts if key not in loaded][:-MAX_KEPT]:
                del self.rollouts[key]
            counts = {key: [one.candidate.to_json(), one.baseline.to_json()] for key, one in self.rollouts.items()}
            edit = partial(self._edit, counts, rollouts[0].key if action else "", action, who)
            begin_ns = self._clock_ns()
            try:
                document = await asyncio.to_thread(self._shared.change, edit)
            except OSError as error:
                raise UnavailableError(f"the shared state of rollouts fails, try again: {error}") from error
            self._look_s = max((self._clock_ns() - begin_ns) / 1e9, 0.9 * self._look_s)
            self._take(document)
            return document

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._shared.period_s)
            await self._try_to_look()

    async def _try_to_look(self) -> None:
        """Log a failure once; the next look tries again."""
        try:
            await self.look()
            self._failure = ""
        except Exception as error:
            if self._failure != str(error):
                self._failure = str(error)
                fault = None if isinstance(error, UnavailableError) else error
                _log.error("rollouts stay as they are: %s", error, exc_info=fault)

    def _edit(self, counts: dict[str, Json], key: str, action: str, who: str, document: Document) -> bool:
        """Put what this member knows into the document, then act or decide; runs on a thread, maybe again."""
        rollouts, now, self._decided = document.rollouts, self._clock_ns(), []
        old = {name: entry["state"]["revision"] for name, entry in rollouts.items()}
        news = [one for one in (self.rollouts[name] for name in counts) if one.state.revision > old.get(one.key, -1)]
        for one in news:  # it is new, or the document was lost
            begun = replace(one.state, changed_unix_ns=one.state.changed_unix_ns or now).to_json()
            named = {"graph": one.graph, "node": one.node, "plan": asdict(one.plan)}
            rollouts[one.key] = {**named, "state": begun, "counts": [], "from_unix_ns": 0}
        own = {name: told for name, told in counts.items() if is_open(rollouts.get(name))}
        has_news = bool(news) or own != self._told
        document.counts[self._shared.member] = own
        for name, entry in rollouts.items():
            if name == key or (is_open(entry) and document.owner == self._shared.member and not self._left_s(entry)):
                plan, state, (candidate, baseline) = plan_of(entry), state_of(entry), sums_of(name, document)
                look = partial(apply, action, who=who) if name == key else advance
                after = look(plan, state, candidate=candidate, baseline=baseline, now_unix_ns=now)
                if replace(after, verdict=state.verdict) != state:
                    has_news, entry["state"] = True, after.to_json()
                if after.revision != state.revision:
                    entry["counts"] = [] if is_open(entry) else [candidate.to_json(), baseline.to_json()]
                    settled_s = _SETTLED * self._shared.period_s + 2 * self._look_s
                    entry["from_unix_ns"] = now + int(settled_s * 1e9) * (len(document.counts) > 1)  # alone, at once
                    self._decided.append(name)
        unknown = sorted(rollouts.keys() - counts.keys(), key=lambda name: rollouts[name]["state"]["changed_unix_ns"])
        for name in sorted(unknown, key=lambda name: is_open(rollouts[name]))[:-MAX_KEPT]:
            del rollouts[name]
        for member, told in list(document.counts.items()):
            document.counts[member] = {name: one for name, one in told.items() if is_open(rollouts.get(name))}
            if not document.counts[member]:
                del document.counts[member]
        return has_news or bool(self._decided)

    def _left_s(self, entry: Json) -> float:
        """Until all follow a decision at once, so that a user does not move back and forth; 0 if clocks differ more."""
        left_s = (entry["from_unix_ns"] - self._clock_ns()) / 1e9
        return left_s if 0.0 < left_s <= 30 * self._shared.period_s else 0.0

    def _take(self, document: Document) -> None:
        self._told = document.counts.get(self._shared.member, {})
        for key, entry in document.rollouts.items():
            state = self._store.states.get(key)
            if state is None or state.revision != entry["state"]["revision"]:
                state = self._store.states[key] = state_of(entry)
                for old in list(self._store.states)[: -10 * MAX_KEPT]:
                    del self._store.states[old]
            if (rollout := self.rollouts.get(key)) is not None:
                if left_s := self._left_s(entry):
                    asyncio.get_running_loop().call_later(left_s, rollout.follow, state)
                else:
                    rollout.follow(state)
        for entry in (document.rollouts[key] for key in self._decided):
            state = state_of(entry)
            log = _log.info if state.phase in (RUNNING, PROMOTED) else _log.warning
            names = (entry["plan"]["candidate"], entry["graph"], entry["node"], state.revision, state.phase)
            log("rollout of '%s' in graph '%s', node '%s', revision %d, %s: %s", *names, state.verdict)


def sums_of(key: str, document: Document) -> tuple[ArmCounts, ArmCounts]:
    """Counts of both sides over all members; of a rollout that is over, those that it ended with."""
    entry = document.rollouts[key]
    told = [one[key] for one in document.counts.values() if key in one] if is_open(entry) else [entry["counts"]]
    sides = [sum((ArmCounts.from_json(arms[side]) for arms in told if arms), ArmCounts()) for side in (0, 1)]
    return sides[0], sides[1]
