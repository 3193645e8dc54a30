"""One request inside the server: what came in, when it came, what it may cost."""

from asyncio import Future
from dataclasses import dataclass, field

from weft_common.core import CallContext, InferCall, InferResult, Parameters
from weft_common.errors import WeftError
from weft_common.tensors import Array, decode


@dataclass(slots=True, eq=False)
class InferenceRequest:
    """A validated request from admission to answer.

    Times are on the clock of ``time.monotonic_ns``. The event loop owns the object; an instance thread reads it while
    it executes it and writes nothing but the decoded arrays.

    Attributes:
        call: The request as it came; inputs are checked against the model's signature.
        context: Deadline, headers, trace context.
        num_rows: Batch size, 1 for a model without batch dimension.
        priority: Level, 1 is highest; 0 where the model has no levels.
        queue_timeout_us: Longest time in the queue in microseconds; 0 means no limit.
        enqueue_ns: When it entered the queue.
        start_ns: When its batch was formed; 0 while it waits.
        num_queued_at_arrival: Requests in the queue when it came.
        batch_key: Requests share a batch only where this is equal; None where any two may.
        sequence: Order of arrival in its queue, from 0.
        is_cancelled: The caller left; backends may look and stop early.
        answer: Receives the result or the error; None outside a served model.
    """

    call: InferCall
    context: CallContext
    num_rows: int = 1
    priority: int = 0
    queue_timeout_us: int = 0
    enqueue_ns: int = 0
    start_ns: int = 0
    num_queued_at_arrival: int = 0
    batch_key: object = None
    sequence: int = -1
    is_cancelled: bool = False
    answer: "Future[InferResult | WeftError] | None" = None
    _arrays: dict[str, Array] = field(default_factory=dict)

    def array(self, name: str) -> Array:
        """Input ``name`` as a read-only numpy array, batch dimension included; decoded once.

        Raises:
            KeyError: The request has no such input.
            InvalidArgumentError: The bytes do not fit the shape.
        """
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = decode(self.call.inputs[name], name=name)
        return array


@dataclass(slots=True)
class InferenceResponse:
    """What a backend answers to one request: outputs by name, batch dimension included."""

    outputs: dict[str, Array]
    parameters: Parameters = field(default_factory=dict)


Outcome = InferenceResponse | WeftError
