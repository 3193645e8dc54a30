"""How the stateful sequences of one model share its instances: ``sequence_batching`` of its configuration."""

from dataclasses import dataclass

from weft.base.core import Parameters
from weft.base.errors import InvalidArgumentError

#: Longest wait for the next request of a sequence, where the configuration names none, in microseconds.
DEFAULT_MAX_IDLE_US = 1_000_000
#: Longest name of a sequence in bytes.
MAX_ID_BYTES = 128

_ID_RANGES = {
    "INT32": (-(2**31), 2**31 - 1),
    "UINT32": (0, 2**32 - 1),
    "INT64": (-(2**63), 2**63 - 1),
    "UINT64": (0, 2**64 - 1),
}


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Field meanings are those of ``ModelSequenceBatching``.

    Attributes:
        is_direct: A sequence owns one row of the batches of its instance; otherwise the oldest requests are batched.
        num_slots: Sequences in progress on one instance; for ``is_direct``, rows of a batch.
        max_idle_us: A sequence that waits longer than this for its next request is ended; microseconds.
        max_queue_delay_us: Direct only: longest time in microseconds that a request waits for other rows to be ready.
        minimum_slot_utilization: Direct only: share of the rows, 0 to 1, that ends this wait.
        id_datatype: Of the input that gets the sequence's id; "": there is none, and any id is accepted.
        has_varying_state: States may differ in shape; only those of one shape share a batch.
        is_iterative: Each request is a sequence, executed until the model releases it.
        max_backlog: Sequences that may wait for a slot; 0: any number.
    """

    is_direct: bool = True
    num_slots: int = 1
    max_idle_us: int = DEFAULT_MAX_IDLE_US
    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0
    id_datatype: str = ""
    has_varying_state: bool = False
    is_iterative: bool = False
    max_backlog: int = 0


def sequence_parameters(parameters: Parameters, model: str, id_datatype: str) -> tuple[int | str, bool, bool]:
    """Id of the sequence of a request, and whether the request starts and ends it.

    Args:
        parameters: Of the request: ``sequence_id``, ``sequence_start`` and ``sequence_end``.
        model: Name, for errors.
        id_datatype: Datatype of the id; "": any.

    Raises:
        InvalidArgumentError: The id is missing or of a wrong type, or a flag is no bool.
    """
    given = parameters.get("sequence_id", 0)
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise InvalidArgumentError(
            f"invalid value type for 'sequence_id' parameter, expected int64_param or string_param, got {given!r}"
        )
    if not given:
        raise InvalidArgumentError(
            f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID; send parameter "
            "'sequence_id'"
        )
    _check_id(given, model, id_datatype)
    return given, _flag(parameters, "sequence_start"), _flag(parameters, "sequence_end")


def _check_id(given: int | str, model: str, id_datatype: str) -> None:
    if isinstance(given, str):
        num_bytes = len(given.encode())
        if num_bytes > MAX_ID_BYTES:
            raise InvalidArgumentError(
                f"string correlation ID cannot be longer than {MAX_ID_BYTES} characters, got {num_bytes} bytes"
            )
        if id_datatype not in ("", "BYTES"):
            raise InvalidArgumentError(
                f"model '{model}' takes its correlation ID as {id_datatype}, got the string {given!r}; send a number "
                "as 'sequence_id'"
            )
        return
    if id_datatype == "BYTES":
        raise InvalidArgumentError(
            f"model '{model}' takes its correlation ID as a string, got the number {given}; send a string as "
            "'sequence_id'"
        )
    low, high = _ID_RANGES.get(id_datatype, (-(2**63), 2**64 - 1))
    if not low <= given <= high:
        raise InvalidArgumentError(
            f"model '{model}' takes its correlation ID as {id_datatype or 'UINT64'}, {low} to {high}, got {given}"
        )


def _flag(parameters: Parameters, key: str) -> bool:
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"invalid value type for '{key}' parameter, expected bool_param, got {value!r}")
    return value
