"""Validates a call before it becomes a request, gives it the model's shapes, and splits it."""

from collections.abc import Sequence

from weft.base.core import InferCall
from weft.base.signature import ModelSignature
from weft.base.tensors import num_elements
from weft.base.validation import validate
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.request.reshape import call_reshaper
from weft.serving.request.split import split_call

#: Strings of one input that are checked on the event loop; checking one takes 0.1 us.
_MANY_STRINGS = 16_384


#: A call that fits its model, with the shapes that the model takes; its batch size; and its parts, calls of at most
#: ``max_batch_size`` rows, none where it is executed as it is.
CheckedCall = tuple[InferCall, int, Sequence[InferCall]]


class CallValidation:
    """Validates the calls of one model.

    Args:
        signature: As clients see it.
        settings: Of the model.

    Attributes:
        checks_strings: Whether a call may take long to check. Those of stateful sequences are checked at once all the
            same: the next one would overtake.
    """

    def __init__(self, signature: ModelSignature, settings: SchedulerSettings) -> None:
        self._signature = signature
        self._max_rows = settings.max_batch_size
        self._can_split = settings.can_split
        has_strings = any(spec.datatype == "BYTES" for spec in signature.inputs)
        self.checks_strings = has_strings and settings.sequences is None
        self._reshape = call_reshaper(signature)

    def has_many_strings(self, call: InferCall) -> bool:
        """Whether ``check`` takes so long that it should run on a thread."""
        return any(
            tensor.datatype == "BYTES" and num_elements(tensor.shape) > _MANY_STRINGS for tensor in call.inputs.values()
        )

    def check(self, call: InferCall) -> CheckedCall:
        """The checked call. Raises InvalidArgumentError for one that does not fit the model."""
        num_rows = validate(call, self._signature, can_split=self._can_split)
        if self._reshape is not None:
            call = self._reshape(call)
        if not self._can_split or num_rows <= self._max_rows:
            return call, num_rows, ()
        return call, num_rows, split_call(call, num_rows, self._max_rows)
