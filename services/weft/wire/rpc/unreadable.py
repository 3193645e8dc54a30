"""Requests whose message cannot be read: the status of their call, and one log line a second for all of them."""

import logging
import time
from collections.abc import Callable

from weft.wire.interface import StatusCode
from weft.wire.rpc.status import CallError

#: Requests of this time share one line in the log: whoever sends garbage must not fill it. In seconds.
_LOG_PERIOD_S = 1.0

_log = logging.getLogger("weft.wire.server")


class UnreadableRequests:
    """Makes the errors of requests that a deserializer refused, and logs that there are some.

    Args:
        clock_s: Time in seconds.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._num_untold = 0
        self._told_s = -_LOG_PERIOD_S

    def failure(self, path: str, peer: str, error: BaseException) -> CallError:
        """The error of one call.

        Args:
            path: ``/service/method``.
            peer: Address of the client.
            error: Raised by the deserializer.

        Returns:
            INVALID_ARGUMENT; RESOURCE_EXHAUSTED for a MemoryError.
        """
        if isinstance(error, MemoryError):
            code = StatusCode.RESOURCE_EXHAUSTED
            details = f"the server has no memory left to read a request of this size for {path}; send a smaller one"
        else:
            code = StatusCode.INVALID_ARGUMENT
            details = f"the request is not a message that {path} takes: {error}; serialize it by the service's .proto"
        self._num_untold += 1
        now_s = self._clock_s()
        if now_s - self._told_s >= _LOG_PERIOD_S:
            extra = {"num_unreadable": self._num_untold, "peer": peer, "status": code.name}
            _log.warning("a request cannot be read: %s", details, extra=extra)
            self._num_untold, self._told_s = 0, now_s
        return CallError(code, details)
