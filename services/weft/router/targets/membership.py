"""The replicas of a target: they come and go with its addresses, and each is watched while it is there."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from weft.base.cancellation import cancel_and_wait
from weft.base.observing.logs import get_logger
from weft.router.target import Target
from weft.router.targets.ejection import OutlierDetector
from weft.router.targets.replica import Health, Replica

#: How often the name is resolved again, in seconds; also so soon after a replica was lost.
RESOLVE_PERIOD_S = 10.0
RESOLVE_SOON_S = 1.0
#: How long a replica that is no longer among the addresses keeps its sequences, in seconds; calls always finish.
SEQUENCE_GRACE_S = 60.0
_DRAIN_CHECK_S = 0.1
#: A discovery asks so many replicas, and more only where there is news: hundreds of them, each with many models, would
#: hold the event loop. Of 300 each is asked every 75 s.
REPLICAS_PER_DISCOVERY = 8
MAX_ASKED_AT_ONCE = 32
#: How long a discovery waits for replicas beside those that have answered: one that hangs must not keep from being
#: called the one that has just come.
PATIENCE_S = 0.25

_log = get_logger("weft.router.targets")

Tell = Callable[[Health], None]


class MembershipSettings(NamedTuple):
    """Everything outside that a membership touches.

    Attributes:
        resolve: Gives the addresses.
        is_fixed: They never change.
        connect: Makes the target of one address.
        watch: Tells of the health of such a target until it is cancelled.
    """

    resolve: Callable[[], Awaitable[Sequence[str]]]
    is_fixed: bool
    connect: Callable[[str], Target]
    watch: Callable[[Target, Tell], Coroutine[Any, Any, None]]


class Membership:
    """Owner of the replicas.

    Args:
        name: Of the target, for the log.
        settings: As its class says.
        detector: Keeps the records of the replicas.
        has_sequences: Whether sequences live at an address.
        on_change: Called after a replica came, left, or changed its health.
        clock_ns: Monotonic.
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
        """There are replicas, and from now on the addresses are followed.

        Raises:
            OSError: The name cannot be resolved now.
        """
        if not (self._is_started or self._surroundings.is_fixed):
            self._keep(self._follow())
        self._is_started = True
        if not self.replicas:
            await self._resolve()

    async def close(self) -> None:
        """Nothing is watched any more, and every replica's target is closed."""
        await cancel_and_wait([*self._tasks, *self._watches.values(), *self._asked.values()])
        self._watches.clear()
        await asyncio.gather(*(replica.target.close() for replica in self.replicas.values()))

    async def ask(self, timeout_s: float) -> Exception | None:
        """Replicas that are due were asked what they serve, and of the others those that were not for the longest time.

        One that does not answer soon is waited for only where none has answered; what it says later counts as a change.
        One that health says is lost is not asked as long as there are others.

        Returns:
            Why none of them answers; None where one does.
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
        """The replicas are those at ``addresses``; others get no new calls and go when they have none."""
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
        watch = self._surroundings.watch(replica.target, lambda health: self._told(replica, health))
        self._watches[address] = asyncio.create_task(watch)

    def _told(self, replica: Replica, health: Health) -> None:
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
        """Keep up with the name."""
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
