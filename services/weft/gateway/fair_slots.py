"""A few slots that clients take in turn, so that many requests of one do not hold up one of another."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable


class FairSlots:
    """Like a semaphore, but free slots go to the clients that wait in turn; owned by the event loop.

    Args:
        num_slots: How many may be held at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting = OrderedDict[Hashable, deque[asyncio.Future[None]]]()  # the client whose turn is next first

    async def take(self, client: Hashable) -> None:
        """Wait for a slot, and hold it until ``give_back``. Cancelling the awaiting task takes none."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got the slot in the same moment
                self.give_back()
            raise

    def give_back(self) -> None:
        """A slot is held no more: the next client gets it."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            while turns:
                turn = turns.popleft()
                if not turn.done():  # else its task was cancelled
                    turn.set_result(None)
                    if turns:
                        self._waiting[client] = turns  # behind the others
                    return
        self._num_free += 1
