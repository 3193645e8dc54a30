"""The replicas of a target: what each serves, whether it is healthy, and how the set changes."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import UnavailableError
from weft.base.observing.logs import get_logger
from weft.base.repository.layout import version_order
from weft.base.signature import ModelSignature
from weft.router.target import Target, TargetModel
from weft.router.targets.balancing.rule import ResponseTime
from weft.router.targets.ejection import OutlierDetector, Record

ModelVersion = tuple[str, str]
#: How often the name is resolved again, in seconds; also so soon after a replica was lost.
RESOLVE_PERIOD_S = 10.0
RESOLVE_SOON_S = 1.0
#: How long a replica that is no longer among the addresses keeps its sequences, in seconds; calls always finish.
SEQUENCE_GRACE_S = 60.0
_DRAIN_CHECK_S = 0.1
#: So many sequences are remembered; the one whose last request is longest ago is forgotten first.
MAX_PINS = 100_000
#: A sequence without requests for so long has ended, in seconds.
MAX_IDLE_S = 3_600.0
#: A discovery asks so many replicas, and more only where there is news: hundreds of them, each with many models, would
#: hold the event loop. Of 300 each is asked every 75 s.
REPLICAS_PER_DISCOVERY = 8
MAX_ASKED_AT_ONCE = 32
#: How long a discovery waits for replicas beside those that have answered: one that hangs must not keep from being
#: called the one that has just come.
PATIENCE_S = 0.25

_log = get_logger("weft.router.targets")


class Health(StrEnum):
    """Health of a replica, from ``grpc.health.v1``.

    UNKNOWN: nothing received yet, or no health service; then its answers to discovery decide.
    """

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    UNREACHABLE = "unreachable"


class Replica:
    """State of one replica.

    Attributes:
        address: Its name in metrics and spans.
        health: As it reports itself.
        models: Result of its last discovery; not ready if it did not answer.
        is_due: Ask it at the next discovery: it is new, its health changed, or it did not answer.
        failure: Why the last discovery failed; None if it did not.
        mismatched: Models for which it gets no calls, because most replicas have another signature.
        num_by_status: Completed calls.
        is_leaving: It is no longer among the addresses; it gets no new calls and goes when it has none.
    """

    def __init__(self, address: str, target: Target, record: Record, clock_ns: Callable[[], int]) -> None:
        self.address = address
        self.target = target
        self.record = record
        self.response = ResponseTime(clock_ns)
        self.health = Health.UNKNOWN
        self.models: dict[ModelVersion, TargetModel] = {}
        self.is_due = True
        self.asked_ns = 0
        self.failure: Exception | None = UnavailableError(f"replica {address} has not answered yet")
        self.mismatched: frozenset[ModelVersion] = frozenset()
        self.num_inflight = 0
        self.num_picks = 0
        self.num_by_status: dict[str, int] = {}
        self.num_ejections_logged = 0
        self.is_leaving = False

    @property
    def is_reachable(self) -> bool:
        """Whether it is connected, as far as known."""
        return self.health is not Health.UNREACHABLE

    @property
    def is_healthy(self) -> bool:
        """Whether it reports that it takes calls."""
        return self.health in (Health.SERVING, Health.UNKNOWN)

    def learn(self, models: Sequence[TargetModel]) -> None:
        """Store its models; new ones get no calls until ``merged`` has compared them with the other replicas."""
        before = self.models
        self.models = {(model.signature.name, model.signature.version): model for model in models}
        self.failure = None
        self.mismatched |= {
            key for key, model in self.models.items() if key not in before or before[key].signature != model.signature
        }

    def lose_models(self) -> None:
        """Mark all its models as not ready, since it does not answer."""
        self.models = {key: model._replace(is_ready=False) for key, model in self.models.items()}

    def versions_of(self, name: str, version: str) -> list[TargetModel]:
        """Versions of a model that a call may mean, whether they are ready or not; without a version all of them."""
        return [model for key, model in self.models.items() if key[0] == name and version in ("", key[1])]

    def has_ready(self, key: ModelVersion) -> bool:
        """Whether it may be called for a model version."""
        model = self.models.get(key)
        return model is not None and model.is_ready and key not in self.mismatched


class Pins:
    """Which replica each stateful sequence runs on."""

    def __init__(
        self, clock_ns: Callable[[], int], *, max_pins: int = MAX_PINS, max_idle_s: float = MAX_IDLE_S
    ) -> None:
        self._clock_ns = clock_ns
        self._max_pins = max_pins
        self._max_idle_ns = int(max_idle_s * 1e9)
        #: Address and time of the last request; the longest idle first.
        self._pins: OrderedDict[Hashable, tuple[str, int]] = OrderedDict()
        self._num_at: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._pins)

    def set(self, sequence: Hashable, address: str) -> None:
        """Pin the sequence, which has a request now, to ``address``."""
        now_ns = self._clock_ns()
        self.forget(sequence)
        self._pins[sequence] = address, now_ns
        self._num_at[address] += 1
        while True:
            oldest, (_, at_ns) = next(iter(self._pins.items()))
            if len(self._pins) <= self._max_pins and now_ns - at_ns < self._max_idle_ns:
                return
            self.forget(oldest)

    def get(self, sequence: Hashable) -> str | None:
        """The address of the sequence; None if unknown."""
        pin = self._pins.get(sequence)
        if pin is None or self._clock_ns() - pin[1] >= self._max_idle_ns:
            return None
        return pin[0]

    def forget(self, sequence: Hashable) -> None:
        """Remove a sequence that has ended."""
        pin = self._pins.pop(sequence, None)
        if pin is not None:
            address = pin[0]
            self._num_at[address] -= 1
            if not self._num_at[address]:
                del self._num_at[address]

    def has(self, address: str) -> bool:
        """Whether a sequence is pinned to ``address``."""
        return address in self._num_at


def having(replicas: Collection[Replica], name: str, version: str) -> list[Replica]:
    """The replicas that have a model version ready and are not leaving.

    Without a version, those whose default version (the highest ready one) has the signature of the highest of all: so
    old and new version share the calls of a rolling update if their signatures are equal.
    """
    staying = [replica for replica in replicas if not replica.is_leaving]
    if version:
        return [replica for replica in staying if replica.has_ready((name, version))]
    defaults = [(replica, found) for replica in staying if (found := _default_version(replica, name)) is not None]
    if not defaults:
        return []
    highest = max((signature for _, signature in defaults), key=_number)
    wanted = _without_version(highest)
    return [replica for replica, found in defaults if found == highest or _without_version(found) == wanted]


def merged(replicas: Sequence[Replica]) -> list[TargetModel]:
    """Merge the models of all replicas; a model is ready if any replica has it ready.

    If signatures differ, the one that most replicas have ready wins, the first of several such; ``mismatched`` of every
    replica is updated.
    """
    found: dict[ModelVersion, list[tuple[Replica, TargetModel]]] = {}
    for replica in replicas:
        for key, model in replica.models.items():
            found.setdefault(key, []).append((replica, model))
    mismatched: dict[Replica, set[ModelVersion]] = {replica: set() for replica in replicas}
    models: list[TargetModel] = []
    for key, listed in found.items():
        offers = [offer for offer in listed if offer[1].is_described] or listed
        num_ready: Counter[ModelSignature] = Counter()
        for _, model in offers:
            num_ready[model.signature] += model.is_ready
        signature = max(num_ready, key=lambda one: num_ready[one])
        chosen = next(model for _, model in offers if model.signature == signature)
        models.append(chosen._replace(is_ready=num_ready[signature] > 0))
        for replica, model in offers if len(num_ready) > 1 else ():
            if model.signature != signature:
                mismatched[replica].add(key)
    for replica in replicas:
        replica.mismatched = frozenset(mismatched[replica])
    return models


def _default_version(replica: Replica, name: str) -> ModelSignature | None:
    ready = [model.signature for key, model in replica.models.items() if key[0] == name and replica.has_ready(key)]
    return max(ready, key=_number, default=None)


def _number(signature: ModelSignature) -> int:
    return version_order(signature.version)


def _without_version(signature: ModelSignature) -> ModelSignature:
    return replace(signature, version="")


OnHealth = Callable[[Health], None]


class MembershipSettings(NamedTuple):
    """How to find and reach the replicas of a target.

    Attributes:
        resolve: Returns the addresses. Raises OSError.
        is_fixed: They never change.
        watch: Reports the health of a target that ``connect`` made until it is cancelled.
    """

    resolve: Callable[[], Awaitable[Sequence[str]]]
    is_fixed: bool
    connect: Callable[[str], Target]
    watch: Callable[[Target, OnHealth], Coroutine[Any, Any, None]]


class Membership:
    """Owns the replicas of a target and keeps them up to date.

    Args:
        name: Of the target, for the log.
        has_sequences: Whether stateful sequences are pinned to an address.
        on_change: Called after a replica came, left, or changed its health.
    """

    def __init__(
        self,
        name: str,
        settings: MembershipSettings,
        detector: OutlierDetector,
        has_sequences: Callable[[str], bool],
        on_change: Callable[[], None],
        clock_ns: Callable[[], int],
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self._name = name
        self._surroundings = settings
        self._detector = detector
        self._has_sequences = has_sequences
        self._on_change = on_change
        self._clock_ns = clock_ns
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Those that are being asked what they serve.
        self._asked: dict[Replica, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_ASKED_AT_ONCE)
        self._wanted = asyncio.Event()
        self._is_started = False

    async def start(self) -> None:
        """Resolve the addresses, now and whenever they may change. Raises OSError if the name has none."""
        if not (self._is_started or self._surroundings.is_fixed):
            self._keep(self._follow())
        self._is_started = True
        if not self.replicas:
            await self._resolve()

    async def close(self) -> None:
        """Stop watching and close every replica's target."""
        await cancel_and_wait([*self._tasks, *self._watches.values(), *self._asked.values()])
        self._watches.clear()
        await asyncio.gather(*(replica.target.close() for replica in self.replicas.values()))

    async def ask(self, timeout_s: float) -> Exception | None:
        """Discover the models of due replicas, and of some others in turn.

        A slow replica is awaited only if none has answered; its later answer counts as a change. A replica that health
        reports as lost is skipped while there are others. Returns why none answers, or None.
        """
        staying = [replica for replica in self.replicas.values() if not replica.is_leaving]
        asked = [replica for replica in staying if replica.is_reachable] or staying
        idle = sorted(
            (replica for replica in asked if replica not in self._asked),
            key=lambda replica: (not replica.is_due, replica.asked_ns),
        )
        num_due = sum(replica.is_due for replica in idle)
        for replica in idle[: max(num_due, REPLICAS_PER_DISCOVERY)]:
            self._asked[replica] = asyncio.create_task(self._ask(replica, timeout_s))
        tasks = [self._asked[replica] for replica in asked if replica in self._asked]
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_S)
            while not any(replica.failure is None for replica in asked) and (
                waiting := [task for task in tasks if not task.done()]
            ):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        failures = [replica.failure for replica in asked]
        return next(iter(failures), None) if all(failures) else None

    async def _ask(self, replica: Replica, timeout_s: float) -> None:
        before = replica.models
        try:
            async with self._slots:
                # What changes while it answers makes it due again.
                was_due, replica.is_due = replica.is_due, False
                replica.asked_ns = self._clock_ns()
                try:
                    replica.learn(await replica.target.discover(timeout_s=timeout_s))
                except Exception as error:
                    replica.lose_models()
                    replica.is_due, replica.failure = True, error
        finally:
            del self._asked[replica]
        if replica.models != before:
            if not was_due:  # the others may well have changed too
                for other in self.replicas.values():
                    other.is_due = other.is_due or other is not replica
            self._on_change()

    def take_over(self, addresses: Sequence[str]) -> None:
        """Set the addresses of the replicas; others get no new calls and go when they have none."""
        is_changed, wanted = False, set(addresses)
        for address in addresses:
            replica = self.replicas.get(address)
            if replica is None:
                self._join(address)
                is_changed = True
            elif replica.is_leaving:
                replica.is_leaving, replica.is_due = False, True
                is_changed = True
        for replica in self.replicas.values():
            if replica.address not in wanted and not replica.is_leaving:
                replica.is_leaving = is_changed = True
                self._keep(self._drain(replica))
        if is_changed:
            self._on_change()

    def _join(self, address: str) -> None:
        replica = Replica(address, self._surroundings.connect(address), self._detector.join(), self._clock_ns)
        self.replicas[address] = replica
        watch = self._surroundings.watch(replica.target, lambda health: self._health_changed(replica, health))
        self._watches[address] = asyncio.create_task(watch)

    def _health_changed(self, replica: Replica, health: Health) -> None:
        before, replica.health = replica.health, health
        if health is before:
            return
        _log.info("replica %s of target '%s' is %s, was %s", replica.address, self._name, health, before)
        replica.is_due = True
        if health is Health.UNREACHABLE:
            replica.lose_models()
            self._wanted.set()
        elif before is Health.UNREACHABLE:
            self._detector.forgive(replica.record)
        self._on_change()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(RESOLVE_SOON_S)
            try:
                async with asyncio.timeout(RESOLVE_PERIOD_S - RESOLVE_SOON_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            try:
                await self._resolve()
            except OSError as error:
                _log.warning("target '%s': %s; its replicas stay as they are", self._name, error)

    async def _resolve(self) -> None:
        addresses = await self._surroundings.resolve()
        if addresses:
            self.take_over(addresses)

    async def _drain(self, replica: Replica) -> None:
        end_ns = self._clock_ns() + int(SEQUENCE_GRACE_S * 1e9)
        while replica.is_leaving:
            has_sequences = self._clock_ns() < end_ns and self._has_sequences(replica.address)
            if not (replica.num_inflight or has_sequences):
                break
            await asyncio.sleep(_DRAIN_CHECK_S)
        if replica.is_leaving and self.replicas.get(replica.address) is replica:
            del self.replicas[replica.address]
            self._detector.leave(replica.record)
            await cancel_and_wait([self._watches.pop(replica.address)])
            await replica.target.close()
            _log.info("replica %s of target '%s' has left", replica.address, self._name)
            self._on_change()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
