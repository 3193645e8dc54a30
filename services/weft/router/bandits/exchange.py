"""Keeps bandits' knowledge on disk and shares it between workers behind one port."""

import asyncio
import contextlib
import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from operator import sub
from pathlib import Path
from typing import IO, Any

from weft.base.errors import UnavailableError
from weft.base.observing.logs import get_logger
from weft.jobs.atomic_files import replace_file
from weft.language.bandit_algorithms import Arm
from weft.router.bandits.store import BanditStore, KnownArm, add_up

FILENAME = "bandits.json"
#: How often what has changed is written, in seconds.
WRITE_PERIOD_S = 1.0

_FORMAT = 1
#: Every whole number up to it is exact as a float too.
_MAX = 1 << 53
#: How often a router tells what it has learned, in seconds.
TELL_PERIOD_S = 0.2

_Name = tuple[str, str, str]

_log = get_logger("weft.router.bandits")


class BanditFile:
    """Keeps a store on disk; a crash loses only what was learned since the last write.

    Args:
        folder: Of this router alone; created if missing.
        period_s: Pause between checks whether there is something to write, in seconds.

    Attributes:
        is_read: Whether ``start`` loads the file into the store; False if the store has that knowledge already.
    """

    def __init__(self, store: BanditStore, folder: Path, *, period_s: float = WRITE_PERIOD_S) -> None:
        self.is_read = True
        self._store = store
        self._path = folder / FILENAME
        self._lock: IO[str] | None = None
        self._period_s = period_s
        self._saved_revision = 0
        self._failure = ""
        self._is_closing = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the file into the store and write it periodically from now on.

        A damaged file is renamed to end in ``.damaged``, and bandits start anew.

        Raises:
            UnavailableError: There is a file that cannot be read, another router has the folder, or it cannot be made.
        """
        await asyncio.to_thread(self._take_folder)
        if self.is_read:
            await asyncio.to_thread(self._load)
            self._saved_revision = self._store.revision
        self._writer = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Write everything, as far as possible, and stop."""
        self._is_closing.set()
        if self._writer is not None:
            await self._writer
        if self._lock is not None:
            self._lock.close()

    async def _keep(self) -> None:
        is_last = False
        while not is_last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._is_closing.wait()
            is_last = self._is_closing.is_set()
            await self._save()

    async def _save(self) -> None:
        revision = self._store.revision
        if revision == self._saved_revision:
            return
        text = _file_text(self._store)
        try:
            await asyncio.to_thread(replace_file, self._path, text.encode())
        except OSError as error:
            if str(error) != self._failure:
                self._failure = str(error)
                _log.error("what bandits have learned cannot be written to %s: %s", self._path, error.strerror)
        else:
            self._saved_revision, self._failure = revision, ""

    def _take_folder(self) -> None:
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._path.with_suffix(".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(f"another router uses --state-dir {folder}; give each its own") from error
        except OSError as error:
            raise UnavailableError(f"--state-dir {folder} cannot be used: {error.strerror}") from error

    def _load(self) -> None:
        try:
            arms = list(_parse(self._path.read_bytes()))
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnavailableError(
                f"what bandits have learned cannot be read from {self._path}: {error.strerror}; make the file readable "
                "or move it away"
            ) from error
        except (ValueError, RecursionError) as error:
            aside = self._path.with_suffix(".damaged")
            _log.error("%s is damaged and is kept as %s, bandits begin anew: %s", self._path, aside.name, error)
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            return
        for known in arms:
            self._store.add(*known)
        _log.info("%d steps of bandits are known from %s", len(arms), self._path)


def _file_text(store: BanditStore) -> str:
    fields = (*_NAMES, *_FIGURES)
    arms = [dict(zip(fields, (graph, node, step, *astuple(arm)), strict=True)) for graph, node, step, arm in store]
    return json.dumps({"format": _FORMAT, "arms": arms}, indent=1) + "\n"


def _parse(data: bytes) -> Iterator[KnownArm]:
    content = json.loads(data)
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("arms"), list):
        raise ValueError(f"it has no 'format': {_FORMAT} with a list 'arms'")
    for entry in content["arms"]:
        if not isinstance(entry, dict):
            raise ValueError(f"{entry!r:.100} is no arm")
        names = [entry.get(key) for key in _NAMES]
        if not all(isinstance(name, str) and name.isprintable() for name in names):
            raise ValueError(f"{entry!r:.100} names no graph, node and step")
        arm = Arm(*(read(entry, key) for key, read in _FIGURES.items()))
        if not (0.0 <= arm.reward_sum <= arm.num_rewards and arm.log_weight <= 0.0):
            raise ValueError(f"the figures of {entry!r:.300} contradict each other")
        graph, node, step = names
        yield KnownArm(str(graph), str(node), str(step), arm)


def _count(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int or not 0 <= value <= _MAX:
        raise ValueError(f"'{key}' is {value!r:.50}, not a count")
    return value


def _number(entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    if not isinstance(value, int | float) or not -_MAX <= value <= _MAX:
        raise ValueError(f"'{key}' is {value!r:.50}, not a number")
    return float(value)


#: Fields of an arm in the file: its names, and how its figures are read, in the order of ``Arm``.
_NAMES = ("graph", "node", "step")
_FIGURES: Mapping[str, Callable[[dict[str, Any], str], Any]] = {
    "pulls": _count,
    "rewards": _count,
    "reward_sum": _number,
    "log_weight": _number,
}


class BanditSharing:
    """Shares pulls and rewards between workers, so that each knows the sums of all.

    A worker sends increments since its last message, so each pull and reward counts once everywhere, in any order.
    Logarithms of weights are added too; what all steps of a node have in common cancels out.

    Args:
        period_s: Pause between checks whether there is something to send, in seconds.
    """

    def __init__(self, store: BanditStore, send: Callable[[bytes], None], *, period_s: float = TELL_PERIOD_S) -> None:
        self._store = store
        self._send = send
        self._period_s = period_s
        #: What all routers know, by names of graph, node and step.
        self._common: dict[_Name, Arm] = {}
        self._published_revision = 0
        self._publisher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sending."""
        self._publisher = asyncio.create_task(self._publish_periodically())

    async def close(self) -> None:
        """Send the rest and stop."""
        if self._publisher is not None:
            self._publisher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._publisher
        self.publish()

    def publish(self) -> None:
        """Send what was learned since the last message."""
        revision = self._store.revision
        if revision == self._published_revision:
            return
        self._published_revision = revision
        changes: list[tuple[_Name, Arm]] = []
        for graph, node, step, arm in self._store:
            name = graph, node, step
            common = self._common.setdefault(name, Arm())
            more = Arm(*map(sub, astuple(arm), astuple(common)))
            if more != Arm():
                changes.append((name, more))
                self._common[name] = replace(arm)
        if changes:
            self._send(_message(changes))

    def take(self, message: bytes) -> None:
        """Add a sibling's message, or the snapshot received at the start."""
        nodes = set()
        for (graph, node, step), fields in json.loads(message):
            more = Arm(*fields)
            self._store.add(graph, node, step, more)
            common = self._common.setdefault((graph, node, step), Arm())
            add_up(common, more)
            if more.log_weight:
                nodes.add((graph, node))
        for graph, node in nodes:
            best = self._store.level(graph, node)
            for name, common in self._common.items():
                if name[:2] == (graph, node):
                    common.log_weight -= best

    def snapshot(self) -> bytes:
        """The knowledge of all workers, for ``take`` of a worker that starts."""
        return _message(self._common.items())

    async def _publish_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            self.publish()


def _message(arms: Iterable[tuple[_Name, Arm]]) -> bytes:
    return json.dumps([(name, astuple(arm)) for name, arm in arms]).encode()
