"""The thread that turns tokens into responses, so that neither the engine nor the event loop has to."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue

from weft_common.errors import InternalError
from weft_common.observing.logs import get_logger
from weft_model.backends.llm.generation import Generation
from weft_model.llm.request import Delta

_LOG = get_logger("weft.model.llm")
#: What came meanwhile is taken together, but no more than this before responses leave.
_MAX_AT_ONCE = 1024

#: What the engine gave, or a generation whose reader has taken a response.
_Item = list[tuple[Generation, Delta]] | Generation


class OutputProcessor:
    """Runs every ``Generation`` of one instance, on a thread of its own.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[_Item | None] = SimpleQueue()
        self._gathered: list[tuple[Generation, Delta]] = []  # the engine's
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def came(self, generation: Generation, delta: Delta) -> None:
        """The engine has a delta; on its thread. Those of a step wait for ``publish``, which wakes this thread once."""
        if delta.error is None:
            self._gathered.append((generation, delta))
        else:  # need not come with a step, nor from the engine's thread
            self._inbox.put([(generation, delta)])

    def publish(self) -> None:
        """The deltas that came are turned into responses; on the engine's thread, never waits."""
        if self._gathered:
            self._inbox.put(self._gathered)
            self._gathered = []

    def taken(self, generation: Generation) -> None:
        """The reader has taken a response; from any thread, never waits."""
        self._inbox.put(generation)

    def close(self) -> None:
        """What came before is done, and the thread has ended."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            touched: dict[Generation, None] = {}  # in the order of their first news
            is_open = False
            for item in self._items():
                if item is None:
                    break
                if isinstance(item, Generation):
                    item.taken()
                    touched[item] = None
                    continue
                for generation, delta in item:
                    self._guarded(generation, partial(generation.add, delta))
                    touched[generation] = None
            else:
                is_open = True
            for generation in touched:
                self._guarded(generation, generation.flush)

    def _items(self) -> Iterator["_Item | None"]:
        """What is there, at least one; waits for that."""
        yield self._inbox.get()
        for _ in range(_MAX_AT_ONCE):
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _guarded(self, generation: Generation, work: Callable[[], None]) -> None:
        """The work is done; a defect in the text of one request does not silence the others."""
        try:
            work()
        except Exception:
            error = InternalError("the answer of the model cannot be made into a response")
            _LOG.exception(error.message, extra={"error_id": error.error_id})
            generation.fail(error)
