"""A stateful sequence, and the place of a request in it."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from weft.base.tensors import WireTensor
from weft.serving.request.request import InferenceRequest


class RequestSequence:
    """Requests with one ``sequence_id``, from the first one to that with ``sequence_end``.

    Attributes:
        id: As the client sent it.
        waiting: Requests that wait, in order.
        running: The request that runs.
        instance: Where it runs; None while it waits for a slot.
        row: Its slot there.
        idle_since_ns: When the latest request was answered, if none waits or runs.
        state: Tensors by input, as the latest request left them; the threads of the instances alone look at it.
        is_over: Whether it has ended.
    """

    __slots__ = ("id", "idle_since_ns", "instance", "is_over", "row", "running", "state", "waiting")

    def __init__(self, sequence_id: int | str) -> None:
        self.id = sequence_id
        self.waiting: deque[InferenceRequest] = deque()
        self.running: InferenceRequest | None = None
        self.instance: Hashable = None
        self.row = -1
        self.idle_since_ns = 0
        self.state: dict[str, WireTensor] = {}
        self.is_over = False


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The place of a request in its sequence.

    Attributes:
        sequence: Of the request.
        is_start: First of the sequence, or of another one under the same id.
        is_end: Last of it.
    """

    sequence: RequestSequence
    is_start: bool
    is_end: bool
