"""Readiness and hang checks: whether a service serves, which models it lacks, and whether it still answers."""

import asyncio
import textwrap
from collections.abc import Callable, Iterable
from typing import NamedTuple

from weft.base.errors import DeadlineExceededError, RemoteError, UnavailableError
from weft.mesh.preflight import MeshError
from weft.v2.client.v2_client import V2Client
from weft.v2.client.wires import WireName
from weft.v2.security.channel import ChannelSecurity

_POLL_INTERVAL_S = 0.05
_CALL_TIMEOUT_S = 5.0
#: A service that loads nothing, and whose models have failed for the same reasons for so long, will not get ready.
_SETTLED_S = 3.0
#: A service that has not answered for so long is reported, at the latest; seconds.
_SILENT_S = 5.0
#: A reason in the summary of a start is cut to so much; the log has all of it.
_MAX_REASON_CHARACTERS = 400


class ModelState(NamedTuple):
    """A version of a model or graph, as a service lists it."""

    name: str
    version: str
    state: str
    reason: str

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return self.state == "READY"

    @property
    def label(self) -> str:
        """The name, and the version if there is one."""
        return f"{self.name}/{self.version}" if self.version else self.name

    def __str__(self) -> str:
        return f"{self.label} is {self.state or 'not loaded'}" + (f": {self.reason}" if self.reason else "")


def told(kind: str, states: Iterable[ModelState]) -> str:
    """How many graphs or models (``kind``) serve, and which do not, with the reason; "" if there is none."""
    listed = list(states)
    failed = [one for one in listed if not one.is_ready and one.reason]
    num_serving = len({one.name for one in listed if one.is_ready})
    if not (num_serving or failed):
        return ""
    text = f"{num_serving} {kind}{'' if num_serving == 1 else 's'} serve{'s' if num_serving == 1 else ''}"
    if not failed:
        return text
    reasons = [
        f"{one.label} ({textwrap.shorten(one.reason, _MAX_REASON_CHARACTERS, placeholder=' ...')})" for one in failed
    ]
    if len(failed) == 1:
        return f"{text}, 1 does not: {reasons[0]}"
    return f"{text}, {len(failed)} do not:" + "".join(f"\n  {reason}" for reason in reasons)


def dialable(address: str) -> str:
    """``host:port`` that reaches a listener: an unspecified host is replaced by this machine's loopback."""
    host, _, port = address.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104  # replaced, not bound
    return f"{loopback}:{port}"


async def wait_ready(
    name: str,
    address: str,
    *,
    deadline_s: float,
    security: ChannelSecurity | None = None,
    wire: WireName | None = None,
) -> list[ModelState]:
    """Wait until the service answers SERVING to ``grpc.health.v1`` and is ready by ``ServerReady``.

    The deadline is on the clock of the running loop, seconds. Returns what the service lists, of which some may not be
    READY without strict readiness. Raises MeshError: the deadline passed, or loading has ended and some cannot serve.
    """
    now = asyncio.get_running_loop().time
    async with V2Client(address, security=security, wire=wire) as service:
        seen: list[ModelState] = []
        seen_since_s = now()
        while not await _is_ready(service):
            obstacles = [one for one in await _states(service) if not one.is_ready]
            if obstacles != seen:
                seen, seen_since_s = obstacles, now()
            has_settled = bool(seen) and all(o.state == "UNAVAILABLE" and o.reason for o in seen)
            if now() >= deadline_s or (has_settled and now() - seen_since_s >= _SETTLED_S):
                reasons = "".join(f"\n  {obstacle}" for obstacle in seen) or " it does not answer SERVING"
                raise MeshError(f"{name} at {address} is not ready:{reasons}")
            await asyncio.sleep(_POLL_INTERVAL_S)
        return await _states(service)


async def _is_ready(service: V2Client) -> bool:
    try:
        return await service.is_serving(timeout_s=_CALL_TIMEOUT_S) and await service.is_ready(timeout_s=_CALL_TIMEOUT_S)
    except RemoteError:
        return False


async def _states(service: V2Client) -> list[ModelState]:
    try:
        index = await service.index(timeout_s=_CALL_TIMEOUT_S)
    except RemoteError:
        return []
    return sorted(ModelState(model.name, model.version, model.state, model.reason) for model in index)


class HangDetector:
    """Detects a hanging service from its answers to health checks; any answer counts.

    The time between two checks counts as at most three periods: if it is longer, as after SIGCONT, this process itself
    was stopped.

    Args:
        hang_timeout_s: Silence that counts as hanging.
        clock_s: Monotonic seconds.
    """

    def __init__(self, hang_timeout_s: float, clock_s: Callable[[], float]) -> None:
        self.period_s = min(1.0, hang_timeout_s / 5)
        self._hang_timeout_s = hang_timeout_s
        self._silent_s = min(_SILENT_S, hang_timeout_s / 2)
        self._clock_s = clock_s
        self._heard_s = clock_s()
        self._unanswered_s = 0.0
        self._is_reported = False

    def heard(self, has_answered: bool) -> str:
        """Record a check; return "", ``"hangs"``, or on a change ``"silent"`` or ``"answers"``."""
        now_s = self._clock_s()
        # A check takes a period at most, and another one passes before it.
        self._unanswered_s += min(now_s - self._heard_s, 3 * self.period_s)
        self._heard_s = now_s
        if has_answered:
            self._unanswered_s = 0.0
            was_reported, self._is_reported = self._is_reported, False
            return "answers" if was_reported else ""
        if self._unanswered_s >= self._hang_timeout_s:
            return "hangs"
        if self._unanswered_s < self._silent_s or self._is_reported:
            return ""
        self._is_reported = True
        return "silent"


async def until_it_hangs(
    address: str,
    hang_timeout_s: float,
    report: Callable[[str], None],
    security: ChannelSecurity | None = None,
    wire: WireName | None = None,
) -> None:
    """Return when the service at the address has not answered for ``hang_timeout_s`` seconds, above 0.

    ``report`` receives ``"silent"`` when it stops answering and ``"answers"`` when it answers again.
    """
    detector = HangDetector(hang_timeout_s, asyncio.get_running_loop().time)
    async with V2Client(address, security=security, wire=wire) as service:
        while True:
            verdict = detector.heard(await _answers(service, detector.period_s))
            if verdict == "hangs":
                return
            if verdict:
                report(verdict)
            await asyncio.sleep(detector.period_s)


async def _answers(service: V2Client, timeout_s: float) -> bool:
    try:
        await service.is_serving(timeout_s=timeout_s)
    except RemoteError as error:
        if error.code == UnavailableError.code:
            # It shows a certificate that this process does not trust, so it is alive.
            return any(word in error.message for word in ("SSL", "certificate"))
        return error.code != DeadlineExceededError.code
    return True
