"""What a user declares of a model that cannot be known from its files."""

import math
from dataclasses import replace

from weft.base.errors import InvalidArgumentError
from weft.capacity.devices.device import DeviceSpec
from weft.capacity.plan.estimate import Estimate, MemoryUse, cost_per_million
from weft.capacity.roofline.timing import Timing


def with_declared(each: Estimate, text: str, spec: DeviceSpec, cost_per_hour: float) -> Estimate:
    """The estimate with memory and time as ``MIB:MS`` says: of an instance, and of a row.

    Raises:
        InvalidArgumentError: The text is not of that form, or the model's files tell it already.
    """
    if each.memory is not None:
        raise InvalidArgumentError(f"--declare: what '{each.model}' needs is known from its files; leave it out")
    mib, separator, ms = text.partition(":")
    try:
        numbers = float(mib), float(ms)
    except ValueError:
        numbers = math.nan, math.nan
    if not separator or not all(0 < number < 1e9 for number in numbers):
        raise InvalidArgumentError(
            f"--declare {each.model}={text} is not of the form MODEL=MIB:MS, memory of an instance and milliseconds of "
            f"a row, such as {each.model}=150:2.5"
        )
    seconds = numbers[1] / 1e3
    memory = MemoryUse(0, int(numbers[0] * 2**20) * each.num_instances)
    return replace(
        each,
        memory=memory,
        time_1=Timing(seconds, "declared"),
        time_max=Timing(seconds * each.max_batch, "declared"),
        rate_per_s=1 / seconds,
        requests_per_s=1 / seconds,
        cost_per_million=cost_per_million(cost_per_hour, each.num_instances / seconds),
        missing_bytes=max(memory.total - spec.memory_bytes, 0),
        notes=("as declared",),
    )
