"""A target of several replicas: each call goes to one, and to others as long as none has begun it."""

import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from opentelemetry import trace
from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import UnavailableError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.router.target import RetryBudget, Target, TargetModel
from weft.router.targets.chooser import Pins, ReplicaChooser
from weft.router.targets.ejection import OutlierDetector, Record
from weft.router.targets.replicas import Membership, MembershipSettings, Replica, merged
from weft.router.targets.specification import BalancingPolicy

#: Name of what gRPC chooses, in metrics and spans.
CHOSEN_BY_GRPC = "chosen by gRPC"

#: After such an answer the replica's models are read again.
_MODEL_IS_GONE = ("UNAVAILABLE", "NOT_FOUND")

_log = get_logger("weft.router.targets")


class ReplicatedTarget(Target):
    """A target whose calls are spread over replicas that serve the same models.

    A call goes to a replica that has the model ready, is healthy and not ejected; where there is none such, to any that
    can be reached. One that was provably not begun is made at another replica, and so on, at each once at most, as far
    as the budget allows. A sequence stays on the replica that it started on, or fails.

    Args:
        by_grpc: Reaches all replicas over one channel on which gRPC chooses; None unless the policy is one of gRPC's.

    Attributes:
        budget: Pays for calls that are made at another replica.
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
    ) -> None:
        self.name = name
        self.address = address
        self.on_change: Callable[[], None] = lambda: None
        self.budget = RetryBudget()
        self.num_moved = 0
        #: Address, model and version of what did not match the others at the last discovery.
        self._mismatched: set[tuple[str, str, str]] = set()
        self._clock_ns = clock_ns
        self._detector = OutlierDetector(clock_ns)
        pins = Pins(clock_ns)
        self._by_grpc = None if by_grpc is None else Replica(CHOSEN_BY_GRPC, by_grpc, Record(), clock_ns)
        self._membership = membership = Membership(
            name,
            settings,
            self._detector,
            pins.has,
            self._changed,
            clock_ns,
        )
        self._chooser = ReplicaChooser(
            f"target '{name}' ({address})",
            policy,
            membership.replicas,
            self._by_grpc,
            self._detector,
            pins,
            clock_ns,
            generator or random.Random(),  # noqa: S311  # no secret depends on it
        )

    @property
    def replicas(self) -> list[Replica]:
        """Every replica, and what gRPC chooses, if it does; may be read on any thread."""
        return [*([] if self._by_grpc is None else [self._by_grpc]), *list(self._membership.replicas.values())]

    @property
    def num_serving(self) -> int:
        """Replicas that have answered, are healthy and not ejected, and stay; may be read on any thread."""
        return sum(
            replica.failure is None and replica.is_healthy and not replica.is_leaving and not self.is_ejected(replica)
            for replica in list(self._membership.replicas.values())
        )

    def is_ejected(self, replica: Replica) -> bool:
        """Whether a replica is left out now because it answered badly."""
        return replica.record.until_ns > self._clock_ns()

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As ``Target.infer``.

        Raises:
            UnavailableError: No replica has the model ready, or that of the sequence is lost.
            WeftError: As the replica's target raised it.
        """
        replica = await self._chooser.choose(call, context)
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
        replica = await self._chooser.choose(call, context)
        has_begun = False
        refused_by: list[Replica] = []
        while True:
            try:
                async with contextlib.aclosing(self._stream(replica, call, context)) as results:
                    async for result in results:
                        has_begun = True
                        yield result
                return
            except WeftError as error:
                if has_begun:
                    raise
                refused_by.append(replica)
                replica = await self._move(refused_by, call, context, error)

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
        self._chooser.note_change()
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

    def _changed(self) -> None:
        self._chooser.note_change()
        self.on_change()

    async def _move(
        self, refused_by: Sequence[Replica], call: InferCall, context: CallContext, error: WeftError
    ) -> Replica:
        failed = refused_by[-1]
        other = await self._chooser.instead(refused_by, call, context, error)
        if not self.budget.take():
            raise error
        self.num_moved += 1
        if telemetry.is_enabled():
            attributes = {"weft.endpoint": other.address, "weft.refused_by": failed.address, "weft.reason": error.code}
            trace.get_current_span(context.trace_context).add_event("weft.call_moved", attributes)
        return other

    async def _infer(self, replica: Replica, call: InferCall, context: CallContext) -> InferResult:
        start_ns = self._begin(replica, context)
        try:
            result = await replica.target.infer(call, context)
        except BaseException as error:
            self._failed(replica, context, error)
            raise
        self._succeeded(replica, call, context, start_ns)
        return result

    async def _stream(
        self, replica: Replica, call: InferCall, context: CallContext
    ) -> AsyncGenerator[InferResult, None]:
        start_ns = self._begin(replica, context)
        try:
            async with contextlib.aclosing(replica.target.stream_infer(call, context)) as results:
                async for result in results:
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
        if call.parameters:
            self._chooser.note_end(call)
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
            self._chooser.forget_ready()
            self._log_ejections(context)

    def _log_ejections(self, context: CallContext) -> None:
        """Replicas that were ejected just now are in the log, and in the span of the call that showed it."""
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
