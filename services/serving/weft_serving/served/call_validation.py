"""What happens to a call before it is a request: it is checked, takes on the model's shapes, and is split."""

import asyncio
from typing import NamedTuple

from weft_common.core import InferCall
from weft_common.signature import ModelSignature
from weft_common.tensors import num_elements
from weft_common.validation import validate
from weft_serving.request.reshape import call_reshaper
from weft_serving.request.split import split_call
from weft_serving.scheduler.settings import SchedulerSettings

#: Strings of one input that are still checked on the event loop; checking one costs 0.1 us.
_MANY_STRINGS = 16_384


class CheckedCall(NamedTuple):
    """A call that fits its model.

    Attributes:
        call: With the shapes that the model takes.
        num_rows: Its batch size.
        parts: Calls of at most ``max_batch_size`` rows; empty where it is executed as it is.
    """

    call: InferCall
    num_rows: int
    parts: list[InferCall]


class CallValidation:
    """Checks the calls of one model.

    Args:
        signature: As clients see it.
        settings: Of the model.
    """

    def __init__(self, signature: ModelSignature, settings: SchedulerSettings) -> None:
        self._signature = signature
        self._max_rows = settings.max_batch_size
        self._can_split = settings.can_split
        self._keeps_order = settings.sequences is not None
        self._reshape = call_reshaper(signature)

    async def checked(self, call: InferCall) -> CheckedCall:
        """As ``check``; many strings are looked at on a thread, not on the event loop.

        Those of sequences are not: the next request would overtake.
        """
        for tensor in () if self._keeps_order else call.inputs.values():
            if tensor.datatype == "BYTES" and num_elements(tensor.shape) > _MANY_STRINGS:
                return await asyncio.to_thread(self.check, call)
        return self.check(call)

    def check(self, call: InferCall) -> CheckedCall:
        """The checked call. Raises InvalidArgumentError for one that does not fit the model."""
        num_rows = validate(call, self._signature, can_split=self._can_split)
        if self._reshape is not None:
            call = self._reshape(call)
        if not self._can_split or num_rows <= self._max_rows:
            return CheckedCall(call, num_rows, [])
        return CheckedCall(call, num_rows, split_call(call, num_rows, self._max_rows))
