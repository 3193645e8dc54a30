"""Whether a service that runs still answers."""

import asyncio
from collections.abc import Callable

from weft_common.client.v2_client import V2Client
from weft_common.errors import DeadlineExceededError, RemoteError, UnavailableError
from weft_common.security.channel import ChannelSecurity

#: A service that has not answered for so long is told of, at the latest; seconds.
_SILENT_S = 5.0


class HangDetector:
    """Judges a service by its answers to health checks; any answer will do.

    A check that is heard of late says little: the judge itself, as after SIGCONT, has not listened.

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
        self._is_told = False

    def heard(self, has_answered: bool) -> str:
        """What to make of one check: "" or, once each time, ``"silent"``, ``"answers"``; ``"hangs"``."""
        now_s = self._clock_s()
        # A check takes a period at most, and another one passes before it.
        self._unanswered_s += min(now_s - self._heard_s, 3 * self.period_s)
        self._heard_s = now_s
        if has_answered:
            self._unanswered_s = 0.0
            was_told, self._is_told = self._is_told, False
            return "answers" if was_told else ""
        if self._unanswered_s >= self._hang_timeout_s:
            return "hangs"
        if self._unanswered_s < self._silent_s or self._is_told:
            return ""
        self._is_told = True
        return "silent"


async def until_it_hangs(
    address: str, hang_timeout_s: float, tell: Callable[[str], None], security: ChannelSecurity | None = None
) -> None:
    """The service at the address has not answered for ``hang_timeout_s`` seconds.

    Args:
        address: To dial.
        hang_timeout_s: Above 0.
        tell: Receives ``"silent"`` when it begins not to answer and ``"answers"`` when it does again.
        security: Of the calls; None: plaintext without a key.
    """
    detector = HangDetector(hang_timeout_s, asyncio.get_running_loop().time)
    async with V2Client(address, security=security) as service:
        while True:
            verdict = detector.heard(await _answers(service, detector.period_s))
            if verdict == "hangs":
                return
            if verdict:
                tell(verdict)
            await asyncio.sleep(detector.period_s)


async def _answers(service: V2Client, timeout_s: float) -> bool:
    try:
        await service.is_serving(timeout_s=timeout_s)
    except RemoteError as error:
        if error.code == UnavailableError.code:
            # It shows a certificate that we do not trust, so it is alive.
            return any(word in error.message for word in ("SSL", "certificate"))
        return error.code != DeadlineExceededError.code
    return True
