"""Which replica of a target a call goes to, where sequences live, and whether it is worth to wait for a replica."""

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence

from weft.base.core import CallContext, InferCall
from weft.base.errors import UnavailableError, WeftError
from weft.router.targets.balancing import least_outstanding, rendezvous_first, sticky
from weft.router.targets.ejection import OutlierDetector
from weft.router.targets.replicas import Ready, Replica, having
from weft.router.targets.specification import BalancingPolicy

#: So long after the last replica was usable a call waits for another one, in seconds: one that was just started again
#: is noticed within less. Later calls fail at once.
MAX_WAIT_S = 2.0
#: So long a call waits that a replica has refused whose health says nothing of it: the word may be on its way.
SHORT_WAIT_S = 0.25

SequenceKey = tuple[str, int | str]
#: So many sequences are remembered; the one whose last request is longest ago is forgotten first.
MAX_PINS = 100_000
#: A sequence without requests for so long has ended, in seconds.
MAX_IDLE_S = 3_600.0


class _NoReplicaError(UnavailableError):
    """There is no replica to call now."""


class Pins:
    """Sequences and the addresses of their replicas."""

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
        """The sequence lives at ``address`` and has a request now."""
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
        """The address where the sequence lives; None where it is not known."""
        pin = self._pins.get(sequence)
        if pin is None or self._clock_ns() - pin[1] >= self._max_idle_ns:
            return None
        return pin[0]

    def forget(self, sequence: Hashable) -> None:
        """The sequence is over."""
        pin = self._pins.pop(sequence, None)
        if pin is not None:
            address = pin[0]
            self._num_at[address] -= 1
            if not self._num_at[address]:
                del self._num_at[address]

    def has(self, address: str) -> bool:
        """Whether a sequence lives at ``address``."""
        return address in self._num_at


class ReplicaChooser:
    """Chooses among the replicas of a target.

    Args:
        where: Name and address of the target, for messages.
        replicas: All of them, by address; the membership's, and changing.
        by_grpc: Stands for what gRPC chooses; None unless the policy is one of gRPC's.
    """

    def __init__(
        self,
        where: str,
        policy: BalancingPolicy,
        replicas: Mapping[str, Replica],
        by_grpc: Replica | None,
        detector: OutlierDetector,
        pins: Pins,
        clock_ns: Callable[[], int],
        generator: random.Random,
    ) -> None:
        self._where = where
        self._policy = policy
        self._replicas = replicas
        self._by_grpc = by_grpc
        self._detector = detector
        self._clock_ns = clock_ns
        make_rule = policy.type.make_rule or least_outstanding  # while gRPC cannot choose
        self._rule = make_rule(generator)
        self._sequence_rule = sticky(self._rule)
        self._pins = pins
        self._ready_replicas: dict[tuple[str, str], Ready] = {}
        self._ready_until_ns = 0
        #: By model and version: when a replica was usable.
        self._last_usable_ns: dict[tuple[str, str], int] = {}
        self._changed = asyncio.Event()

    def note_change(self) -> None:
        """Replicas have come, left, changed their health or what they serve; calls that wait look again."""
        self.forget_ready()
        self._changed.set()
        self._changed = asyncio.Event()

    def forget_ready(self) -> None:
        """A replica was ejected: which ones may answer is to be found anew."""
        self._ready_until_ns = 0

    def note_end(self, call: InferCall) -> None:
        """A call has succeeded; it may have been the last of its sequence."""
        if call.parameters.get("sequence_end") is True and (sequence := _sequence_of(call)) is not None:
            self._pins.forget(sequence)

    async def choose(self, call: InferCall, context: CallContext) -> Replica:
        """The replica for a call.

        Raises:
            UnavailableError: No replica has the model ready, or that of the sequence is lost.
        """
        sequence = _sequence_of(call)
        while True:
            try:
                return self._for_call(call, context) if sequence is None else self._home_of(sequence, call)
            except _NoReplicaError:
                last_usable_ns = self._last_usable_ns.get((call.model_name, call.model_version))
                if last_usable_ns is None or not await self._changes_within(last_usable_ns, MAX_WAIT_S, context):
                    raise

    async def instead(
        self, refused_by: Sequence[Replica], call: InferCall, context: CallContext, error: WeftError
    ) -> Replica:
        """Another replica for a call that ``refused_by``, the latest last, have not begun.

        Raises the error for the client where there is none.
        """
        failed = refused_by[-1]
        sequence = _sequence_of(call)
        if sequence is not None and call.parameters.get("sequence_start") is not True:
            if error.code == "UNAVAILABLE" and (error.is_refused or getattr(error, "is_unanswered", False)):
                raise self._lost(sequence, failed.address) from error
            raise error
        if not error.is_refused:
            raise error
        since_ns = self._clock_ns()
        while not (others := self._others(refused_by, call)):
            wait_s = SHORT_WAIT_S if failed.is_healthy else MAX_WAIT_S
            if error.code != "UNAVAILABLE" or not await self._changes_within(since_ns, wait_s, context):
                raise error
        other = self._rule(others, self._policy.key_of(call, context))
        if sequence is not None:
            self._pins.set(sequence, other.address)
        return other

    def _others(self, refused_by: Sequence[Replica], call: InferCall) -> Sequence[Replica]:
        try:
            ready = self._ready(call)
        except _NoReplicaError:
            return []
        return [one for one in ready.usable if one not in refused_by] or [
            one for one in ready.last_resort if one not in refused_by
        ]

    async def _changes_within(self, since_ns: int, wait_s: float, context: CallContext) -> bool:
        """Whether something changes before the wait, or the deadline, has passed."""
        end_ns = since_ns + int(wait_s * 1e9)
        if context.deadline_ns is not None:
            end_ns = min(end_ns, context.deadline_ns)
        try:
            async with asyncio.timeout((end_ns - self._clock_ns()) / 1e9):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _for_call(self, call: InferCall, context: CallContext) -> Replica:
        ready = self._ready(call)
        if self._by_grpc is not None and ready.usable and ready.is_everywhere:
            return self._by_grpc
        usable, last_resort = ready.usable, ready.last_resort
        replicas = _fresh(usable, context) or usable or _fresh(last_resort, context) or last_resort
        return self._rule(replicas, self._policy.key_of(call, context))

    def _home_of(self, sequence: SequenceKey, call: InferCall) -> Replica:
        is_start = call.parameters.get("sequence_start") is True
        address = None if is_start else self._pins.get(sequence)
        if address is not None:
            home = self._replicas.get(address)
            if home is None or not home.is_reachable:
                raise self._lost(sequence, address)
        else:
            ready = self._ready(call)
            replicas, key = ready.usable or ready.last_resort, f"{sequence[0]}/{sequence[1]}"
            # A sequence that another router started is where that one put it, unless it was busy there.
            home = self._sequence_rule(replicas, key) if is_start else rendezvous_first(replicas, key)
        self._pins.set(sequence, home.address)
        return home

    def _lost(self, sequence: SequenceKey, address: str) -> UnavailableError:
        self._pins.forget(sequence)
        return UnavailableError(
            f"sequence {sequence[1]!r} ended: the replica that it ran on ({address}) is lost; start it again"
        )

    def _ready(self, call: InferCall) -> Ready:
        """The replicas that may answer. Raises ``_NoReplicaError``."""
        now_ns = self._clock_ns()
        if now_ns >= self._ready_until_ns:
            self._ready_replicas.clear()
            self._ready_until_ns = self._detector.next_return_ns()
        key = call.model_name, call.model_version
        ready = self._ready_replicas.get(key)
        if ready is None:
            ready = self._ready_replicas[key] = self._find_ready(*key)
        if ready.usable:
            self._last_usable_ns[key] = now_ns
        if not (ready.usable or ready.last_resort):
            version = f" version {call.model_version}" if call.model_version else ""
            raise _NoReplicaError(f"model '{call.model_name}'{version} is not ready on any replica of {self._where}")
        return ready

    def _find_ready(self, name: str, version: str) -> Ready:
        replicas = list(self._replicas.values())
        found = having(replicas, name, version)
        usable = [one for one in found if one.is_healthy and not self._detector.is_ejected(one.record)]
        ejected = [one for one in found if one.is_healthy and self._detector.is_ejected(one.record)]
        last_resort = ejected or [one for one in found if one.is_reachable and not one.is_healthy]
        staying = {one for one in replicas if one.is_healthy and not one.is_leaving}
        return Ready(usable, last_resort, is_everywhere=staying <= set(found))


def _fresh(replicas: Sequence[Replica], context: CallContext) -> Sequence[Replica]:
    tried = context.tried
    return [replica for replica in replicas if replica.address not in tried] if tried else replicas


def _sequence_of(call: InferCall) -> SequenceKey | None:
    """Model and id of the sequence that a call belongs to."""
    given = call.parameters.get("sequence_id")
    if not given or isinstance(given, bool) or not isinstance(given, int | str):
        return None
    return call.model_name, given
