"""The connectivity state of a channel, and those who wait for another one."""

import asyncio

from weft.wire.interface import ChannelConnectivity


class Connectivity:
    """A state that can be waited for.

    Attributes:
        state: Now.
    """

    def __init__(self) -> None:
        self.state = ChannelConnectivity.IDLE
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self, state: ChannelConnectivity) -> None:
        """Enter a state; SHUTDOWN is the last one."""
        if state is self.state or self.state is ChannelConnectivity.SHUTDOWN:
            return
        self.state = state
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for_change(self, last: ChannelConnectivity) -> None:
        """Return once the state is another than ``last``."""
        while self.state is last:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
