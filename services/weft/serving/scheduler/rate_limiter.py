"""Rate limiter: which instance executes next if models share resources, such as a device's memory or cores.

An instance starts when all its resources are free, and releases them when its batch has run; a waiting one holds none.
Turns are fair: an execution costs an instance its priority, and the instance that has spent least goes first. Idle time
earns nothing.

An instance that needs much would starve while others that need little keep the resources busy. After ``PATIENCE`` turns
of others, its missing resources are reserved for it; but only for ``RESERVATION_NS``, because their holder may itself
wait for a model that it called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError

#: A resource on one device; the device of a global one is None.
ResourceKey = tuple[str, int | None]

#: Turns of others before resources are reserved for an instance that waits for them.
PATIENCE = 8
#: How long they stay reserved.
RESERVATION_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RateLimit:
    """``rate_limiter`` of an instance group: resource units that an execution occupies, of its device or global.

    ``priority`` is its cost: with 2 an instance gets half the turns that it would get with 1.
    """

    priority: int = 1
    resources: tuple[tuple[str, int], ...] = ()
    global_resources: tuple[tuple[str, int], ...] = ()

    def demands(self, device_id: int) -> dict[ResourceKey, int]:
        """Units that an instance on the device occupies, by resource."""
        demands: dict[ResourceKey, int] = {(name, device_id): count for name, count in self.resources}
        return demands | {(name, None): count for name, count in self.global_resources}


class Pool(Protocol):
    """The instances of one model."""

    def waiting(self) -> "Iterable[Contender]":
        """Idle instances with requests to run."""

    def callers(self) -> set[str]:
        """Tokens of the instances whose models wait for requests of this one."""

    def run_one(self) -> None:
        """Start one batch, if there is one."""


class Contender:
    """An instance as the limiter sees it."""

    __slots__ = ("demands", "is_running", "name", "next_turn", "priority", "reserved_until_ns", "token", "turn")

    def __init__(self, name: str, priority: int, demands: Mapping[ResourceKey, int], token: str = "") -> None:
        self.name = name
        self.token = token
        self.priority = priority
        self.demands = demands
        self.is_running = False
        self.next_turn = 0  # when its next execution is due, on the limiter's own clock of turns
        self.turn: int | None = None  # the same once it waits for resources
        self.reserved_until_ns = 0


class RateLimiter:
    """Gives resources to instances; lives on the event loop.

    ``limits`` are units by name and device; with the device None, for each device, and for a global resource. Resources
    without a limit have as many units as the most demanding instance needs. ``set_alarm`` schedules ``serve`` at a
    ``time.monotonic_ns``.
    """

    def __init__(self, limits: Mapping[ResourceKey, int], *, set_alarm: Callable[[int], None]) -> None:
        self._limits = dict(limits)
        self._set_alarm = set_alarm
        self._members: dict[Pool, Sequence[Contender]] = {}
        self._totals: dict[ResourceKey, int] = {}
        self._used: dict[ResourceKey, int] = {}
        self._turn = 0  # of the latest execution
        self._num_started = 0

    def join(self, pool: Pool, members: Sequence[Contender]) -> None:
        """Admit a pool. Raises InvalidArgumentError if an instance needs too much, or mixes global and device."""
        known = {key for others in self._members.values() for other in others for key in other.demands}
        scopes = {name: device is None for name, device in known}
        for member in members:
            for (name, device), count in member.demands.items():
                if scopes.setdefault(name, device is None) != (device is None):
                    raise InvalidArgumentError(
                        f'Resource "{name}" is present as both global and device-specific resource in the model '
                        f"configuration; instance {member.name} says global: {str(device is None).lower()}"
                    )
                limit = self._limit((name, device))
                if limit is not None and count > limit:
                    where = "" if device is None else f" on device {device}"
                    raise InvalidArgumentError(
                        f'Resource count for "{name}" is limited to {limit}{where} which will prevent scheduling of '
                        f"one or more model instances, the minimum required count is {count} (instance {member.name}); "
                        f"raise --rate-limit-resource {name}:{count}, or lower the count in rate_limiter"
                    )
        self._members[pool] = members
        self._count_totals()
        self.serve()

    def leave(self, pool: Pool) -> None:
        """Remove a pool; its instances release their resources by ``finish``."""
        if self._members.pop(pool, None) is not None:
            self._count_totals()

    def check_call(self, contenders: Sequence[Contender], callers: set[str]) -> None:
        """Raise ResourceExhaustedError if all contenders need resources held by instances that wait for their call."""
        waiting = callers.union(*(pool.callers() for pool in self._members))
        held: dict[ResourceKey, int] = {}
        for members in self._members.values():
            for member in members:
                if member.is_running and member.token in waiting:
                    for key, count in member.demands.items():
                        held[key] = held.get(key, 0) + count
        for contender in contenders:
            if all(self._totals.get(key, 0) - held.get(key, 0) >= count for key, count in contender.demands.items()):
                return
        needs = ", ".join(f"{count} of '{name}'" for (name, _), count in contenders[0].demands.items())
        raise ResourceExhaustedError(
            f"instance {contenders[0].name} needs {needs}, which instances hold that wait for this call or for others; "
            "raise --rate-limit-resource, or let the calling model do without"
        )

    def may_start(self, contender: Contender, now_ns: int) -> bool:
        """Whether all its resources are free, and none of them is reserved for another."""
        if self._lacks(contender):
            self._note_wait(contender)
            return False
        turn = self._turn_of(contender)
        for other in self._overtaken():
            if other is contender or turn - self._turn_of(other) < PATIENCE * other.priority:
                continue
            if not any(key in contender.demands for key in self._lacks(other)):
                continue
            if not other.reserved_until_ns:
                other.reserved_until_ns = now_ns + RESERVATION_NS
                self._set_alarm(other.reserved_until_ns)
            if now_ns < other.reserved_until_ns:
                return False
            other.turn, other.reserved_until_ns = turn, 0  # its reservation has lapsed; it gets another one
        return True

    def start(self, contender: Contender) -> None:
        """Give the contender its resources; call only after ``may_start`` returned True."""
        self._turn = self._turn_of(contender)
        contender.next_turn = self._turn + contender.priority
        contender.is_running = True
        for members in self._members.values():
            if contender in members:  # its model has had a turn, and others of it wait from now on
                for member in members:
                    member.turn, member.reserved_until_ns = None, 0
        self._num_started += 1
        for key, count in contender.demands.items():
            self._used[key] = self._used.get(key, 0) + count

    def finish(self, contender: Contender) -> None:
        """Release the resources of the contender, if it holds any, and start others with them."""
        if not contender.is_running:
            return
        contender.is_running = False
        for key, count in contender.demands.items():
            self._used[key] -= count
            if not self._used[key]:
                del self._used[key]
        self.serve()

    def serve(self) -> None:
        """Start every execution that can start, in the order of turns."""
        num_started = dict.fromkeys(self._members, 0)
        while num_started:
            dues = [
                (min(self._turn_of(contender) for contender in contenders), num, index, pool)
                for index, (pool, num) in enumerate(num_started.items())
                if (contenders := [contender for contender in pool.waiting() if not self._lacks(contender)])
            ]
            if not dues:
                return
            pool = min(dues)[3]
            num_before = self._num_started
            pool.run_one()
            if num_before == self._num_started:
                del num_started[pool]
            else:
                num_started[pool] += 1

    def _limit(self, key: ResourceKey) -> int | None:
        name, device = key
        if device is None:  # all devices share it, so that a limit which names one is meant for all
            return next((count for (limited, _), count in self._limits.items() if limited == name), None)
        return self._limits.get(key, self._limits.get((name, None)))

    def _count_totals(self) -> None:
        most: dict[ResourceKey, int] = {}
        for members in self._members.values():
            for member in members:
                for key, count in member.demands.items():
                    most[key] = max(most.get(key, 0), count)
        self._totals = {key: count if (limit := self._limit(key)) is None else limit for key, count in most.items()}

    def _lacks(self, contender: Contender) -> list[ResourceKey]:
        totals, used = self._totals, self._used
        return [key for key, count in contender.demands.items() if totals.get(key, 0) - used.get(key, 0) < count]

    def _turn_of(self, contender: Contender) -> int:
        return max(contender.next_turn, self._turn) if contender.turn is None else contender.turn

    def _note_wait(self, contender: Contender) -> None:
        if contender.turn is None:
            contender.turn = self._turn_of(contender)

    def _overtaken(self) -> Iterator[Contender]:
        for pool, members in self._members.items():
            waiting = set(pool.waiting())
            for member in members:
                if member not in waiting:
                    member.turn, member.reserved_until_ns = None, 0
                elif self._lacks(member):
                    self._note_wait(member)
                    yield member


def parse_limit(text: str) -> tuple[ResourceKey, int]:
    """A limit written as ``NAME:COUNT`` or ``NAME:COUNT:DEVICE``. Raises ValueError with the reason."""
    name, _, rest = text.partition(":")
    count, _, device = rest.partition(":")
    if not name or not count.isdecimal() or not (device.isdecimal() or rest == count):
        raise ValueError(f"must be NAME:COUNT or NAME:COUNT:DEVICE with whole numbers of at least 0, got '{text}'")
    return (name, int(device) if device else None), int(count)
