"""A target of several replicas: each call goes to one, and to another if the first provably did not begin it."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from opentelemetry import trace
from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import UnavailableError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.router.target import RetryBudget, Target, TargetModel
from weft.router.targets.balancing import rendezvous_first, sticky
from weft.router.targets.balancing.prefix import PrefixRule
from weft.router.targets.balancing.rule import least_outstanding
from weft.router.targets.ejection import OutlierDetector, Record
from weft.router.targets.replicas import Membership, MembershipSettings, Pins, Replica, having, merged
from weft.router.targets.specification import BalancingPolicy
from weft.router.targets.streams import MovableStream, SplitCall, is_split, parameter_of
from weft.v2.protocol.handover import ROLE

#: Name of what gRPC chooses, in metrics and spans.
CHOSEN_BY_GRPC = "chosen by gRPC"
#: So long after the last replica was usable a call waits for another one, in seconds: one that was just started again
#: is noticed within less. Later calls fail at once.
MAX_WAIT_S = 2.0
#: So long a call waits that a replica has refused whose health says nothing of it: the word may be on its way.
SHORT_WAIT_S = 0.25
#: So long a stream that has begun waits for another replica, as for one that is started again, in seconds.
STREAM_WAIT_S = 10.0
#: After such an answer the replica's models are read again.
_MODEL_IS_GONE = ("UNAVAILABLE", "NOT_FOUND")

SequenceKey = tuple[str, int | str]

#: Header of a call that is sent again after its replica was lost; what it calls in turn is not sent again for a loss.
REPEATED_HEADER = "x-weft-repeated"
#: Calls of one request that fail at one address within this time were lost together.
_SAME_LOSS_NS = 500_000_000

_log = get_logger("weft.router.targets")


#: Request parameters by which a call changes a model, so that all its replicas must get it.
_FOR_ALL_REPLICAS = frozenset({"load_lora_adapter", "unload_lora_adapter"})


class _NoReplicaError(UnavailableError):
    """No replica can be called now."""


class _Ready(NamedTuple):
    """Replicas that have a model.

    Attributes:
        usable: Healthy and not ejected.
        last_resort: The ejected, or else the reachable ones; called if none is usable.
        is_everywhere: Every healthy replica has the model.
        migration_limit: Times that a stream of it may move.
        prefills: Of the usable ones, those that only compute prompts; others are then ``usable``, if there are any.
    """

    usable: Sequence[Replica]
    last_resort: Sequence[Replica]
    is_everywhere: bool
    migration_limit: int
    prefills: Sequence[Replica] = ()


class ReplicatedTarget(Target):
    """Spreads calls over replicas that serve the same models.

    A call goes to a replica that has the model ready, is healthy and not ejected; if there is none, to any reachable
    one. A call that was provably not begun is repeated at another replica, at each at most once, as far as the budget
    allows. So is a call whose replica was lost before any response, if the model ``can_repeat``; but a client's request
    that was in work at two lost replicas is not sent again, since it may be what ends them. The stream of a language
    model goes on at another replica behind the tokens that have come, as often as the model's ``migration_limit``
    says; one that brought no token between two losses may be what ends replicas. A stateful sequence stays on the
    replica that it started on, or fails.

    Args:
        mesh_key: Signs what one replica is told of another's blocks; "": no request is split.
        by_grpc: Reaches all replicas over one channel on which gRPC chooses; None unless the policy is one of gRPC's.

    Attributes:
        budget: Pays for calls that are repeated at another replica.
        num_moved: Calls that were not begun and were made at another replica.
        num_repeated: Calls whose replica was lost and that were made again.
        num_migrated: Times that a stream went on at another replica.
        prefixes: The rule, if the policy is ``prefix``.
    """

    def __init__(
        self,
        name: str,
        address: str,
        policy: BalancingPolicy,
        settings: MembershipSettings,
        by_grpc: Target | None = None,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        generator: random.Random | None = None,
        mesh_key: str = "",
    ) -> None:
        self.name = name
        self.address = address
        self.on_change: Callable[[], None] = lambda: None
        self.budget = RetryBudget()
        self.num_moved = 0
        self.num_repeated = self.num_migrated = 0
        self._mesh_key = mesh_key
        #: Address, model and version of what did not match the others at the last discovery.
        self._mismatched: set[tuple[str, str, str]] = set()
        self._clock_ns = clock_ns
        self._detector = OutlierDetector(clock_ns)
        self._pins = Pins(clock_ns)
        self._by_grpc = None if by_grpc is None else Replica(CHOSEN_BY_GRPC, by_grpc, Record(), clock_ns)
        self._membership = Membership(name, settings, self._detector, self._pins.has, self._on_change, clock_ns)
        self._key_of = policy.key_of
        make_rule = policy.type.make_rule or least_outstanding  # while gRPC cannot choose
        self._rule = make_rule(generator or random.Random())  # noqa: S311  # no secret depends on it
        self.prefixes = self._rule if isinstance(self._rule, PrefixRule) else None
        self._sequence_rule = sticky(self._rule)
        #: By model and version, until ``_ready_until_ns``: what may answer, and when a replica last was usable.
        self._ready: dict[tuple[str, str], _Ready] = {}
        self._ready_until_ns = 0
        self._last_usable_ns: dict[tuple[str, str], int] = {}
        self._changed = asyncio.Event()

    @property
    def replicas(self) -> list[Replica]:
        """Every replica, and gRPC's choice, if it chooses; thread-safe."""
        return [*([] if self._by_grpc is None else [self._by_grpc]), *list(self._membership.replicas.values())]

    @property
    def num_serving(self) -> int:
        """Number of replicas that have answered, are healthy, not ejected and not leaving; thread-safe."""
        return sum(
            replica.failure is None and replica.is_healthy and not replica.is_leaving and not self.is_ejected(replica)
            for replica in list(self._membership.replicas.values())
        )

    def is_ejected(self, replica: Replica) -> bool:
        """Whether a replica is ejected now."""
        return replica.record.until_ns > self._clock_ns()

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Like ``Target.infer``.

        Raises:
            UnavailableError: No replica has the model ready, or that of the sequence is lost.
            WeftError: From the replica's target.
        """
        if not _FOR_ALL_REPLICAS.isdisjoint(call.parameters):
            return await self._infer_on_all(call, context)
        replica = await self._choose(call, context)
        refused_by: list[Replica] = []
        while True:
            try:
                return await self._infer(replica, call, context)
            except WeftError as error:
                refused_by.append(replica)
                replica = await self._move(refused_by, call, context, error)

    @override
    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``Target.stream_infer``; errors as of ``infer``."""
        replica = await self._choose(call, context)
        *_, limit, prefills = self._ready_for(call)
        stream = MovableStream(call, limit if _sequence_of(call) is None else 0)
        split = self._split(prefills if stream.limit else (), call, context)
        replica = split.replica or replica
        refused_by: list[Replica] = []
        try:
            while True:
                try:
                    results = self._stream(replica, split.call_for(replica, stream.call), context)
                    try:
                        async for result in results:
                            is_handed_over = split.take(result)
                            yield stream.take(result)
                            if is_handed_over:
                                break
                        else:
                            return
                    finally:
                        await split.end(results)
                    stream.go_on()
                    replica = await self._choose(stream.call, context)
                except WeftError as error:
                    if stream.is_under_way:
                        refused_by.clear()
                        if stream.num_moves:  # it made progress, so it did not end the replicas before
                            (context.root or context).lost = ()
                    if stream.has_begun:
                        stream.move(error)
                    refused_by.append(replica)
                    replica = await self._move(refused_by, stream.call, context, error, stream)
        finally:
            await split.close()

    @override
    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        """As ``Target.discover``: the models of all replicas that answer, each ready where one replica has it ready.

        Raises:
            UnavailableError: The name has no address.
            WeftError: No replica answers; the error of one.
        """
        try:
            await self._membership.start()
        except OSError as error:
            raise UnavailableError(f"target '{self.name}' ({self.address}) cannot be resolved: {error}") from error
        failure = await self._membership.ask(timeout_s)
        replicas = [replica for replica in self._membership.replicas.values() if not replica.is_leaving]
        models = merged(replicas)
        mismatched = {(replica.address, *key) for replica in replicas for key in replica.mismatched}
        for one in mismatched - self._mismatched:
            _log.warning(
                "replica %s of target '%s' has another signature of model '%s' version %s than the others, and gets no "
                "calls of it", one[0], self.name, *one[1:],
            )  # fmt: skip
        self._mismatched = mismatched
        self._look_again()
        if not replicas:
            raise UnavailableError(f"target '{self.name}' ({self.address}) has no address")
        if failure is not None:
            raise failure
        return models

    @override
    async def close(self) -> None:
        await self._membership.close()
        if self._by_grpc is not None:
            await self._by_grpc.target.close()

    def _on_change(self) -> None:
        """Update the replicas after some have joined, left, or changed their health."""
        self._look_again()
        self.on_change()

    def _look_again(self) -> None:
        """Wake waiting calls to check again which replicas may answer."""
        self._ready_until_ns = 0
        self._changed.set()
        self._changed = asyncio.Event()

    async def _choose(self, call: InferCall, context: CallContext) -> Replica:
        sequence = _sequence_of(call)
        while True:
            try:
                return self._for_call(call, context) if sequence is None else self._home_of(sequence, call)
            except _NoReplicaError:
                last_usable_ns = self._last_usable_ns.get((call.model_name, call.model_version))
                if last_usable_ns is None or not await self._changes_within(last_usable_ns, MAX_WAIT_S, context):
                    raise

    def _for_call(self, call: InferCall, context: CallContext) -> Replica:
        usable, last_resort, is_everywhere, *_ = self._ready_for(call)
        if self._by_grpc is not None and usable and is_everywhere:
            return self._by_grpc
        replicas = _fresh(usable, context) or usable or _fresh(last_resort, context) or last_resort
        context.balancing_key = self._key_of(call, context)
        return self._rule(replicas, context.balancing_key)

    def _split(self, prefills: Sequence[Replica], call: InferCall, context: CallContext) -> SplitCall:
        """Whether and where the prompt of a call is computed apart: by its length, and by the load there."""
        free = [replica for replica in prefills if is_split(replica, call)] if self._mesh_key else []
        if not free:
            return SplitCall(None, "")
        context.balancing_key = self._key_of(call, context)
        return SplitCall(self._rule(_fresh(free, context) or free, context.balancing_key), self._mesh_key)

    def _home_of(self, sequence: SequenceKey, call: InferCall) -> Replica:
        is_start = call.parameters.get("sequence_start") is True
        address = None if is_start else self._pins.get(sequence)
        if address is not None:
            home = self._membership.replicas.get(address)
            if home is None or not home.is_reachable:
                raise self._lost(sequence, address)
        else:
            usable, last_resort, *_ = self._ready_for(call)
            replicas, key = usable or last_resort, f"{sequence[0]}/{sequence[1]}"
            # A sequence that another router started is where that one put it, unless it was busy there.
            home = self._sequence_rule(replicas, key) if is_start else rendezvous_first(replicas, key)
        self._pins.set(sequence, home.address)
        return home

    def _lost(self, sequence: SequenceKey, address: str) -> UnavailableError:
        self._pins.forget(sequence)
        return UnavailableError(
            f"sequence {sequence[1]!r} ended: the replica that it ran on ({address}) is lost; start it again"
        )

    def _ready_for(self, call: InferCall) -> _Ready:
        """The replicas that may answer, at least one. Raises ``_NoReplicaError``."""
        now_ns = self._clock_ns()
        if now_ns >= self._ready_until_ns:
            self._ready.clear()
            self._ready_until_ns = self._detector.next_return_ns()
        key = call.model_name, call.model_version
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = self._find_ready(*key)
        if ready.usable:
            self._last_usable_ns[key] = now_ns
        elif not ready.last_resort:
            version = f" version {call.model_version}" if call.model_version else ""
            raise _NoReplicaError(
                f"model '{call.model_name}'{version} is not ready on any replica of target '{self.name}' "
                f"({self.address})"
            )
        return ready

    def _find_ready(self, name: str, version: str) -> _Ready:
        replicas = list(self._membership.replicas.values())
        found = having(replicas, name, version)
        usable = [one for one in found if one.is_healthy and not self._detector.is_ejected(one.record)]
        ejected = [one for one in found if one.is_healthy and self._detector.is_ejected(one.record)]
        last_resort = ejected or [one for one in found if one.is_reachable and not one.is_healthy]
        staying = {one for one in replicas if one.is_healthy and not one.is_leaving}
        prefills = [one for one in usable if parameter_of(one, name, version, ROLE) == "prefill"]
        others = [one for one in usable if one not in prefills]
        is_everywhere = staying <= set(found) and not prefills
        versions = (model for replica in found for model in replica.versions_of(name, version))
        limit = min((model.signature.migration_limit for model in versions), default=0)
        return _Ready(others or usable, last_resort, is_everywhere, limit, prefills if others else ())

    async def _move(
        self,
        refused_by: Sequence[Replica],
        call: InferCall,
        context: CallContext,
        error: WeftError,
        stream: MovableStream | None = None,
    ) -> Replica:
        """Pick another replica for a call that those in ``refused_by`` (latest last) did not begin, or were lost with.

        A ``stream`` that has begun goes on there; that is bounded by its own limit, and costs nothing of the budget.
        Raises the error for the client if the call may not be repeated, or no replica is left.
        """
        has_begun = stream is not None and stream.has_begun
        other = await self._instead(refused_by, call, context, error, stream if has_begun else None)
        migrated = None if error.is_refused or not has_begun else stream
        if not has_begun and not self.budget.take():
            raise error
        if migrated is not None:
            self.num_migrated += 1
        elif error.is_refused:
            self.num_moved += 1
        else:
            self.num_repeated += 1
            context.headers = {**context.headers, REPEATED_HEADER: "1"}
        if telemetry.is_enabled():
            refuser = refused_by[-1].address
            attributes: dict[str, str | int] = {"weft.endpoint": other.address, "weft.refused_by": refuser}
            attributes["weft.reason"] = error.code
            event = "weft.call_moved" if migrated is None else "weft.stream_migrated"
            if migrated is not None:
                attributes["weft.tokens"] = migrated.num_tokens
            trace.get_current_span(context.trace_context).add_event(event, attributes)
        return other

    async def _instead(
        self,
        refused_by: Sequence[Replica],
        call: InferCall,
        context: CallContext,
        error: WeftError,
        begun: MovableStream | None,
    ) -> Replica:
        failed = refused_by[-1]
        is_lost = not error.is_refused and getattr(error, "is_unanswered", False)
        if is_lost and not (begun and begun.made_progress):
            self._note_loss(failed, call, context)
        sequence = _sequence_of(call)
        if sequence is not None and call.parameters.get("sequence_start") is not True:
            if error.code == "UNAVAILABLE" and (error.is_refused or is_lost):
                raise self._lost(sequence, failed.address) from error
            raise error
        may_go_on = begun is not None and not (context.root or context).is_suspect
        may_repeat = may_go_on or (is_lost and sequence is None and self._may_repeat(call, context))
        if not error.is_refused and not may_repeat:
            raise error
        since_ns = self._clock_ns()
        while not (others := self._others(refused_by, call)):
            wait_s = STREAM_WAIT_S if begun else SHORT_WAIT_S if failed.is_healthy else MAX_WAIT_S
            if error.code != "UNAVAILABLE" or not await self._changes_within(since_ns, wait_s, context):
                raise error
        context.balancing_key = self._key_of(call, context)
        other = self._rule(others, context.balancing_key)
        if sequence is not None:
            self._pins.set(sequence, other.address)
        return other

    def _note_loss(self, failed: Replica, call: InferCall, context: CallContext) -> None:
        root, now_ns = context.root or context, self._clock_ns()
        if any(address == failed.address and now_ns - at_ns < _SAME_LOSS_NS for address, at_ns in root.lost):
            return
        root.lost += ((failed.address, now_ns),)
        if root.is_suspect:
            _log.warning(
                "request '%s' of model '%s' was in work at %d replicas that were lost (%s): it may be what ends them, "
                "and is not sent again", call.request_id, call.model_name, len(root.lost),
                ", ".join(address for address, _ in root.lost),
            )  # fmt: skip

    def _may_repeat(self, call: InferCall, context: CallContext) -> bool:
        root = context.root or context
        if root.is_suspect or REPEATED_HEADER in root.headers:
            return False
        versions = [
            model
            for replica in self._membership.replicas.values()
            for model in replica.versions_of(call.model_name, call.model_version)
        ]
        return bool(versions) and all(model.signature.can_repeat for model in versions)

    def _others(self, refused_by: Sequence[Replica], call: InferCall) -> Sequence[Replica]:
        try:
            usable, last_resort, *_ = self._ready_for(call)
        except _NoReplicaError:
            return []
        others = [one for one in usable if one not in refused_by]
        return others or [one for one in last_resort if one not in refused_by]

    async def _changes_within(self, since_ns: int, wait_s: float, context: CallContext) -> bool:
        """Wait for a change; False if the wait or the deadline passes first."""
        end_ns = since_ns + int(wait_s * 1e9)
        if context.deadline_ns is not None:
            end_ns = min(end_ns, context.deadline_ns)
        try:
            async with asyncio.timeout((end_ns - self._clock_ns()) / 1e9):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _infer(self, replica: Replica, call: InferCall, context: CallContext) -> InferResult:
        start_ns = self._begin(replica, context)
        try:
            result = await replica.target.infer(call, context)
        except BaseException as error:
            self._failed(replica, context, error)
            raise
        self._succeeded(replica, call, context, start_ns)
        if self.prefixes is not None:
            self.prefixes.note(replica.address, context.balancing_key, result)
        return result

    async def _infer_on_all(self, call: InferCall, context: CallContext) -> InferResult:
        """Send a call to every replica that may answer; the answer of one, or the error of one that failed."""
        ready = self._ready_for(call)
        calls = [self._infer(replica, call, context) for replica in ready.usable or ready.last_resort]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return next(result for result in results if not isinstance(result, BaseException))

    async def _stream(
        self, replica: Replica, call: InferCall, context: CallContext
    ) -> AsyncGenerator[InferResult, None]:
        start_ns = self._begin(replica, context)
        try:
            async with contextlib.aclosing(replica.target.stream_infer(call, context)) as results:
                async for result in results:
                    if self.prefixes is not None:
                        self.prefixes.note(replica.address, context.balancing_key, result)
                    yield result
        except BaseException as error:
            self._failed(replica, context, error)
            raise
        self._succeeded(replica, call, context, start_ns)

    def _begin(self, replica: Replica, context: CallContext) -> int:
        replica.num_picks += 1
        replica.num_inflight += 1
        if context.tried is not None:
            context.tried.append(replica.address)
        if context.trace_context is not None and telemetry.is_enabled():
            trace.get_current_span(context.trace_context).set_attribute("weft.endpoint", replica.address)
        return self._clock_ns()

    def _succeeded(self, replica: Replica, call: InferCall, context: CallContext, start_ns: int) -> None:
        replica.response.measured((self._clock_ns() - start_ns) / 1e9)
        if call.parameters and call.parameters.get("sequence_end") is True:
            self._pins.forget(_sequence_of(call))
        self._end(replica, context, "OK")

    def _failed(self, replica: Replica, context: CallContext, error: BaseException) -> None:
        if not isinstance(error, WeftError):
            self._end(replica, context, "CANCELLED")
            return
        replica.is_due = replica.is_due or error.code in _MODEL_IS_GONE
        self._end(replica, context, error.code, is_refused=error.is_refused)

    def _end(self, replica: Replica, context: CallContext, status: str, *, is_refused: bool = False) -> None:
        replica.num_inflight -= 1
        replica.num_by_status[status] = replica.num_by_status.get(status, 0) + 1
        # A replica that refuses calls itself is no outlier: its health check decides.
        if replica is not self._by_grpc and not is_refused and self._detector.note(replica.record, status):
            self._ready_until_ns = 0
            self._log_ejections(context)

    def _log_ejections(self, context: CallContext) -> None:
        """Log replicas just ejected, also in the span of the call that caused it."""
        for replica in self._membership.replicas.values():
            record = replica.record
            if record.num_ejected == replica.num_ejections_logged:
                continue
            replica.num_ejections_logged = record.num_ejected
            duration_s = (record.until_ns - self._clock_ns()) / 1e9
            _log.warning("replica %s of target '%s' is ejected for %.0f s", replica.address, self.name, duration_s)
            if telemetry.is_enabled():
                attributes: dict[str, str | float] = {"weft.endpoint": replica.address, "weft.duration_s": duration_s}
                trace.get_current_span(context.trace_context).add_event("weft.ejection", attributes)


def _fresh(replicas: Sequence[Replica], context: CallContext) -> Sequence[Replica]:
    """Replicas not yet tried for this request."""
    tried = context.tried
    return [replica for replica in replicas if replica.address not in tried] if tried else replicas


def _sequence_of(call: InferCall) -> SequenceKey | None:
    """Model and sequence id of a call."""
    given = call.parameters.get("sequence_id")
    if not given or isinstance(given, bool) or not isinstance(given, int | str):
        return None
    return call.model_name, given
