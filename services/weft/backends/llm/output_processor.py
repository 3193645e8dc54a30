"""The thread that converts tokens into responses, which keeps this work off the engine's thread and the event loop."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue

from weft.backends.llm.generation import Generation
from weft.base.errors import InternalError
from weft.base.observing.logs import get_logger
from weft.llm.request import Delta

_LOG = get_logger("weft.model.llm")
#: Most queued items that are processed before responses are sent.
_MAX_BATCH = 1024

#: Deltas of a step, or a generation whose client has read a response.
_Item = list[tuple[Generation, Delta]] | Generation


class OutputProcessor:
    """Runs every ``Generation`` of one instance on a dedicated thread.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[_Item | None] = SimpleQueue()
        self._step_deltas: list[tuple[Generation, Delta]] = []  # used only by the engine's thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, generation: Generation, delta: Delta) -> None:
        """Collect a delta, on the engine's thread, until ``publish`` passes on all deltas of a step at once."""
        if delta.error is None:
            self._step_deltas.append((generation, delta))
        else:  # errors may come outside of a step and from other threads
            self._inbox.put([(generation, delta)])

    def publish(self) -> None:
        """Queue the collected deltas for conversion; called on the engine's thread, never blocks."""
        if self._step_deltas:
            self._inbox.put(self._step_deltas)
            self._step_deltas = []

    def on_response_taken(self, generation: Generation) -> None:
        """Record that a client has read a response; any thread, never blocks."""
        self._inbox.put(generation)

    def close(self) -> None:
        """Process everything queued so far, and end the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            updated: dict[Generation, None] = {}  # in the order of their first update
            is_open = False
            for item in self._items():
                if item is None:
                    break
                if isinstance(item, Generation):
                    item.on_response_taken()
                    updated[item] = None
                    continue
                for generation, delta in item:
                    self._run_isolated(generation, partial(generation.add, delta))
                    updated[generation] = None
            else:
                is_open = True
            for generation in updated:
                self._run_isolated(generation, generation.flush)

    def _items(self) -> Iterator["_Item | None"]:
        """The queued items; blocks for the first."""
        yield self._inbox.get()
        for _ in range(_MAX_BATCH):
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _run_isolated(self, generation: Generation, work: Callable[[], None]) -> None:
        """Run ``work``; a defect fails its own request only."""
        try:
            work()
        except Exception:
            error = InternalError("the answer of the model cannot be made into a response")
            _LOG.exception(error.message, extra={"error_id": error.error_id})
            generation.fail(error)
