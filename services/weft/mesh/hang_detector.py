"""Whether a service that runs still answers."""

import asyncio
from collections.abc import Callable

from weft.base.errors import DeadlineExceededError, RemoteError, UnavailableError
from weft.v2.client.v2_client import V2Client
from weft.v2.client.wires import WireName
from weft.v2.security.channel import ChannelSecurity

#: A service that has not answered for so long is reported, at the latest; seconds.
_SILENT_S = 5.0


class HangDetector:
    """Judges a service by its answers to health checks; any answer counts.

    The time between two checks counts as at most three periods: when it is longer, as after SIGCONT, this process
    itself has not listened.

    Args:
        hang_timeout_s: A service that is silent for so long hangs.
        clock_s: Seconds that never go back.
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
        """The verdict after one check: "", ``"hangs"``, or, when it changes, ``"silent"`` or ``"answers"``."""
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
    """Return when the service at the address has not answered for ``hang_timeout_s`` seconds.

    Args:
        address: To dial.
        hang_timeout_s: Above 0.
        report: Receives ``"silent"`` when it stops answering and ``"answers"`` when it answers again.
        security: Of the calls; None: plaintext without a key.
        wire: Implementation of gRPC for the calls; None: ``default_wire``.
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
